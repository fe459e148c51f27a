"""The instruction set: everything a rank can do, each one a small frozen object.

``str()`` writes an instruction in the token grammar of ``torch.distributed.pipelining`` (with our
extensions ``@version``, ``STEP``, ``REDUCE_TIED`` and ``SYNC_SCALARS``); ``parse`` reads one back,
whole or not at all.
"""

import re
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

from stagewright.schedules.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class _OfMicrobatch:
    stage: int
    microbatch: int
    mnemonic: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.stage}{self.mnemonic}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class _Computation:
    stage: int
    microbatch: int
    version: int | None = None
    mnemonic: ClassVar[str]

    def __str__(self) -> str:
        token = f"{self.stage}{self.mnemonic}{self.microbatch}"
        return token if self.version is None else f"{token}@{self.version}"


@dataclass(frozen=True, slots=True)
class _OfStage:
    stage: int
    mnemonic: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.stage}{self.mnemonic}"


@dataclass(frozen=True, slots=True)
class Forward(_Computation):
    """y = stage(x); stash x and y."""

    mnemonic = "F"


@dataclass(frozen=True, slots=True)
class Backward(_Computation):
    """dx, dw = gradients of the stash at dy; weights.grad += dw; drop the stash."""

    mnemonic = "B"


@dataclass(frozen=True, slots=True)
class InputGradient(_Computation):
    """dx = gradient of the stash at dy; keep what dw needs."""

    mnemonic = "I"


@dataclass(frozen=True, slots=True)
class WeightGradient(_Computation):
    """weights.grad += dw from what the input gradient kept; drop the stash."""

    mnemonic = "W"


@dataclass(frozen=True, slots=True)
class SendActivation(_OfMicrobatch):
    """rank of (stage + 1) <- y of this stage; never blocks compute."""

    mnemonic = "SEND_F"


@dataclass(frozen=True, slots=True)
class ReceiveActivation(_OfMicrobatch):
    """post a receive for x of this stage; its forward waits for it."""

    mnemonic = "RECV_F"


@dataclass(frozen=True, slots=True)
class SendGradient(_OfMicrobatch):
    """rank of (stage - 1) <- dx of this stage; never blocks compute."""

    mnemonic = "SEND_B"


@dataclass(frozen=True, slots=True)
class ReceiveGradient(_OfMicrobatch):
    """post a receive for dy of this stage; its backward waits for it."""

    mnemonic = "RECV_B"


@dataclass(frozen=True, slots=True)
class Overlap:
    """forward and backward as one fused pair: both inputs first, then both at once."""

    forward: Forward
    backward: Backward

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


@dataclass(frozen=True, slots=True)
class Unshard(_OfStage):
    """gather the full parameters of a sharded stage."""

    mnemonic = "UNSHARD"


@dataclass(frozen=True, slots=True)
class Reshard(_OfStage):
    """free the gathered parameters of a sharded stage."""

    mnemonic = "RESHARD"


@dataclass(frozen=True, slots=True)
class ReduceGradient(_OfStage):
    """start summing weights.grad over the replicas of this stage; its step waits for it."""

    mnemonic = "REDUCE_GRAD"


@dataclass(frozen=True, slots=True)
class ReduceTied(_OfStage):
    """weights.grad of tied parameters = its sum over the stages that share them."""

    mnemonic = "REDUCE_TIED"


@dataclass(frozen=True, slots=True)
class SyncScalars:
    """tell all ranks this one's part of norm, overflow and count; the steps wait for the parts of all."""

    def __str__(self) -> str:
        return "SYNC_SCALARS"


@dataclass(frozen=True, slots=True)
class Step:
    """weights[version] = optimizer(weights[version - 1], weights.grad); weights.grad = 0."""

    stage: int
    version: int
    mnemonic: ClassVar[str] = "STEP"

    def __str__(self) -> str:
        return f"{self.stage}STEP@{self.version}"


Computation: TypeAlias = Forward | Backward | InputGradient | WeightGradient
Communication: TypeAlias = SendActivation | ReceiveActivation | SendGradient | ReceiveGradient
Update: TypeAlias = Unshard | Reshard | ReduceGradient | ReduceTied | SyncScalars | Step
Instruction: TypeAlias = Computation | Overlap | Communication | Update

_NUMBER = r"(?:0|[1-9][0-9]{0,8})"
_TOKEN = re.compile(rf"({_NUMBER})([A-Z]+(?:_[A-Z]+)*)({_NUMBER})?(?:@({_NUMBER}))?")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")

_COMPUTATIONS: Final[dict[str, type[Computation]]] = {
    kind.mnemonic: kind for kind in (Forward, Backward, InputGradient, WeightGradient)
}
_COMMUNICATIONS: Final[dict[str, type[Communication]]] = {
    kind.mnemonic: kind for kind in (SendActivation, ReceiveActivation, SendGradient, ReceiveGradient)
}
_OF_STAGE: Final[dict[str, type[Unshard | Reshard | ReduceGradient | ReduceTied]]] = {
    kind.mnemonic: kind for kind in (Unshard, Reshard, ReduceGradient, ReduceTied)
}


def parse(token: str) -> Instruction:
    """Read one token, such as ``2F5``, ``3SEND_B1`` or ``(2F5;3B1)OVERLAP_F_B``.

    Raises:
        ScheduleError: the text is not, from its first to its last character, one token.
    """
    if token == "SYNC_SCALARS":
        return SyncScalars()
    if pair := _OVERLAP.fullmatch(token):
        forward, backward = parse(pair[1]), parse(pair[2])
        if isinstance(forward, Forward) and isinstance(backward, Backward):
            return Overlap(forward, backward)
    elif found := _TOKEN.fullmatch(token):
        instruction = _of_parts(*found.groups())
        if instruction is not None:
            return instruction
    raise ScheduleError(
        f"{token!r} is no instruction; one is written like 2F5, 2B5, 2I5, 2W5, 2F5@1, 2SEND_F5, 2RECV_B5, "
        "(2F5;3B1)OVERLAP_F_B, 2STEP@1, 2REDUCE_GRAD, 2UNSHARD, 2RESHARD, 0REDUCE_TIED or SYNC_SCALARS",
        rule="token",
    )


def _of_parts(stage: str, mnemonic: str, microbatch: str | None, version: str | None) -> Instruction | None:
    """The instruction of a token's parts, or None where a part is missing or too many."""
    if mnemonic == Step.mnemonic and microbatch is None and version is not None:
        return Step(int(stage), int(version))
    if mnemonic in _COMPUTATIONS and microbatch is not None:
        return _COMPUTATIONS[mnemonic](int(stage), int(microbatch), None if version is None else int(version))
    if version is not None:
        return None
    if mnemonic in _COMMUNICATIONS and microbatch is not None:
        return _COMMUNICATIONS[mnemonic](int(stage), int(microbatch))
    if mnemonic in _OF_STAGE and microbatch is None:
        return _OF_STAGE[mnemonic](int(stage))
    return None
