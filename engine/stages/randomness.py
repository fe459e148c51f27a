"""Randomness: which random numbers a stage sees, whatever rank or schedule runs it.

Before each forward the generator is seeded with ``seed_of(seed, step, microbatch, stage)``, so that dropout is a
function of those four alone, and a recomputation repeats it. Under data parallelism microbatch m of replica d counts as
number d * M + m, where M is the microbatches of one replica: the replicas draw what one pipeline would draw for all of
their microbatches, one replica's after the other's. A stage that wants masks which do not even depend on
how the model was cut into stages has a method ``seed_microbatch(number)``; it is called with
``seed_of(seed, step, microbatch)`` before each forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

import torch

_MASK: Final = (1 << 64) - 1


def seed_of(*parts: int) -> int:
    """Mix some integers into one of 63 bits: SplitMix64 (Steele et al. 2014), one round a part."""
    state = 0
    for part in parts:
        state = ((state ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class Seeds:
    """The random numbers of all forwards of one rank.

    As a context it puts the generators of the device back afterwards, so that a step leaves the caller's own
    random numbers as they were.

    Args:
        seed: of the whole training.
        device: whose generators the stages draw from.
        first_microbatch: the number of this replica's first one among those of all replicas.
    """

    def __init__(self, seed: int, device: torch.device, first_microbatch: int = 0) -> None:
        self._seed = seed
        self._first_microbatch = first_microbatch
        self.device = device
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self._states: list[torch.Tensor] = []

    def plant(self, step: int, microbatch: int, stage: int) -> int:
        """Seed for one forward, and give the number for stages that seed themselves."""
        microbatch += self._first_microbatch
        number = seed_of(self._seed, step, microbatch, stage)
        for generator in self._generators:
            generator.manual_seed(number)
        return seed_of(self._seed, step, microbatch)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside the context, give the caller's generators back for a while."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def __enter__(self) -> "Seeds":
        self._states = [generator.get_state() for generator in self._generators]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for generator, state in zip(self._generators, self._states):
            generator.set_state(state)
