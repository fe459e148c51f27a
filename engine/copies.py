"""Copies: those of a stage, on other ranks or in other replicas, are found to be alike before they train together.

What they add up lies side by side, with nothing that says which number belongs to which parameter.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Final, TypeAlias

from torch import nn

from stagewright.engine.errors import PeerError, described
from stagewright.engine.everyone import gather_texts, listed
from stagewright.engine.transport.contract import Transport
from stagewright.engine.transport.group import Group
from stagewright.engine.updates.sharing import kind_of
from stagewright.schedules import Placement

# Name and kind of every parameter and buffer of a stage.
Description: TypeAlias = Sequence[tuple[str, str]]

_REMEDY: Final = "build the same module for every copy, and freeze the same parameters in each"


class CopiesAlike:
    """A block in which each rank checks the stages that it has built; at its end their copies are alike, or all raise.

    Nothing is exchanged where every stage has a single copy.

    Args:
        placement: says which ranks hold a copy of which stage.
        transport: connects the ranks of this pipeline.
        group: the same rank of all replicas.
    """

    def __init__(self, placement: Placement, transport: Transport, group: Group) -> None:
        num_copies = (len(placement.replicas_of(stage)) for stage in range(placement.num_stages))
        self._has_copies = group.size > 1 or max(num_copies) > 1
        self._transport = transport
        self._group = group
        self._stages: Mapping[int, Description] = {}

    def answer(self, modules: Mapping[int, nn.Module]) -> None:
        """Say what this rank has built."""
        if self._has_copies:
            self._stages = {stage: describe(module) for stage, module in modules.items()}

    def __enter__(self) -> "CopiesAlike":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Hear all ranks.

        Raises:
            ValueError: copies differ; all ranks raise it.
            PeerError: another rank has refused what it has built.
        """
        if not self._has_copies:
            return
        if isinstance(error, Exception):
            with suppress(PeerError):  # the error that is under way says more
                self._hear(described(error))
        elif error is None:
            self._compare(self._hear())

    def _hear(self, refusal: str = "") -> dict[int, dict[str, str]]:
        """By stage, a digest of what each rank has built."""
        digests = {stage: hashlib.sha256(json.dumps(of).encode()).hexdigest() for stage, of in self._stages.items()}
        answers = gather_texts(self._transport, self._group, json.dumps([refusal, digests]))
        of_stages: dict[int, dict[str, str]] = {}
        for rank, text in answers.items():
            its_refusal, its_digests = json.loads(text)
            if its_refusal and not refusal:
                raise PeerError(f"{rank} has refused its stages: {its_refusal}")
            for stage, digest in its_digests.items():
                of_stages.setdefault(int(stage), {})[rank] = digest
        return of_stages

    def _compare(self, of_stages: Mapping[int, Mapping[str, str]]) -> None:
        different = min((stage for stage, digests in of_stages.items() if len({*digests.values()}) > 1), default=None)
        if different is None:
            return
        texts = gather_texts(self._transport, self._group, json.dumps(self._stages.get(different)))
        found = {rank: json.loads(text) for rank, text in texts.items() if rank in of_stages[different]}
        raise ValueError(f"copies of a stage are alike: {first_difference(different, found)}; {_REMEDY}")


def describe(module: nn.Module) -> list[tuple[str, str]]:
    """What has to be the same in all copies, in the order in which their tensors lie side by side."""
    parameters = [(name, kind_of(parameter)) for name, parameter in module.named_parameters()]
    buffers = [(name, f"buffer {buffer.dtype}{list(buffer.shape)}") for name, buffer in module.named_buffers()]
    return [(name, kind.replace("torch.", "")) for name, kind in (*parameters, *buffers)]


def first_difference(stage: int, of_ranks: Mapping[str, Description]) -> str:
    """The first parameter or buffer that is not the same on all ranks, and who has what."""
    for number, column in enumerate(zip_longest(*of_ranks.values(), fillvalue=("", "nothing"))):
        holders: dict[tuple[str, str], list[str]] = {}
        for rank, (name, kind) in zip(of_ranks, column):
            holders.setdefault((name, kind), []).append(rank)
        if len(holders) == 1:
            continue
        if len({name for name, _ in holders}) == 1:
            told = [f"{kind} on {listed(ranks)}" for (_, kind), ranks in holders.items()]
            return f"{column[0][0]} of stage {stage} is {', '.join(told)}"
        told = [f"{' '.join(filter(None, one))} on {listed(ranks)}" for one, ranks in holders.items()]
        return f"parameter or buffer {number} of stage {stage} is {', '.join(told)}"
    raise AssertionError("their digests differ")
