"""Megatron's data iterators: each chunk reads its microbatches from an iterator of its own."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from stagewright.schedules import Program
from stagewright.schedules.instructions import Forward, Overlap

# One for all, where there is one chunk, or one a chunk; None where a chunk reads nothing.
DataIterator: TypeAlias = Iterator[Any] | Sequence[Iterator[Any] | None] | None


class Picker:
    """A data iterator for a chunk that computes some microbatches of a batch only, or in another order.

    Every item of the trainer's iterator is one microbatch, and this gives the one that is wanted.

    Args:
        iterator: the trainer's.
        num_microbatches: items that make a batch.
    """

    def __init__(self, iterator: Iterator[Any], num_microbatches: int) -> None:
        self._iterator = iterator
        self._num_microbatches = num_microbatches
        self._num_read = 0
        self._wanted = 0
        self._unused: dict[int, Any] = {}

    def pick(self, microbatch: int) -> None:
        """Say which microbatch is computed now."""
        self._wanted = microbatch

    def __iter__(self) -> "Picker":
        return self

    def __next__(self) -> Any:
        while self._num_read <= self._wanted:
            self._read()
        if self._wanted not in self._unused:
            raise ValueError(
                "the schedule computes a stage's microbatches on several ranks or out of order, so each is one item of "
                "the data iterator: forward_step_func asked for a second one"
            )
        return self._unused.pop(self._wanted)

    def end_batch(self) -> None:
        """Leave the trainer's iterator where the next batch begins, unless it is not read here at all."""
        while 0 < self._num_read < self._num_microbatches:
            self._read()

    def _read(self) -> None:
        self._unused[self._num_read] = next(self._iterator)
        self._num_read += 1


# What forward_step_func gets: the trainer's own iterator, or one that picks from it.
Reader: TypeAlias = Iterator[Any] | Picker | None


def readers_of(data_iterator: DataIterator, program: Program, rank: int, *, forward_only: bool) -> dict[int, Reader]:
    """What each stage of a rank reads from: the trainer's iterator wherever microbatches come in order.

    Raises:
        ValueError: there is not one iterator a stage.
    """
    stages = program.placement.stages_of(rank)
    iterators: list[Iterator[Any] | None]
    if isinstance(data_iterator, Sequence):
        iterators = list(data_iterator)
    else:
        iterators = [data_iterator] * (1 if data_iterator is not None else len(stages))
    if len(iterators) != len(stages):
        raise ValueError(
            f"every chunk reads from a data iterator of its own, model[c] from data_iterator[c]: got {len(iterators)} "
            f"for {len(stages)} chunks"
        )
    readers: dict[int, Reader] = dict(zip(stages, iterators))
    for stage, iterator in zip(stages, iterators):
        if iterator is not None and not forward_only and not _in_order(program, rank, stage):
            readers[stage] = Picker(iterator, program.num_microbatches)
    return readers


def _in_order(program: Program, rank: int, stage: int) -> bool:
    """Whether a rank forwards all microbatches of a batch on a stage, one after the other."""
    stream = (item.forward if isinstance(item, Overlap) else item for item in program.streams[rank])
    order = [item.microbatch for item in stream if isinstance(item, Forward) and item.stage == stage]
    return order == list(range(program.num_microbatches))
