"""Late steps: updates that need other ranks, which tell each other what they must know and step when it has come."""

from collections.abc import Sequence, Set
from typing import TypeAlias

from stagewright.schedules.instructions import Backward, Forward, ReduceGradient, ReduceTied, Step, SyncScalars

Work: TypeAlias = Forward | Backward | Step | ReduceGradient | ReduceTied | SyncScalars


def reduce_all(piece: Sequence[Work]) -> list[Work]:
    """Sum the gradients of every stage that an update steps, before the first of its STEPs."""
    steps = [instruction for instruction in piece if isinstance(instruction, Step)]
    work: list[Work] = []
    reduced: set[int] = set()
    version = 0
    for instruction in piece:
        match instruction:
            case ReduceGradient(stage):
                reduced.add(stage)
            case Step() if instruction.version > version:
                version = instruction.version
                stages = [step.stage for step in steps if step.version == version and step.stage not in reduced]
                work += map(ReduceGradient, reversed(stages))
                reduced = set()
        work.append(instruction)
    return work


def put_off(pieces: Sequence[Sequence[Work]], tied_stages: Set[int], scalars: bool) -> list[list[Work]]:
    """In the place of STEPs that need other ranks tell those what they must know, and step later.

    That is before the version is read, or before there is something to tell of the next one.

    Args:
        pieces: a rank's windows and its drain.
        tied_stages: stages that share a weight with another one.
        scalars: an update needs a value that depends on every rank.
    """
    tied = [stage for stage in _stages_of(pieces) if stage in tied_stages]
    reduces = any(isinstance(instruction, ReduceGradient) for piece in pieces for instruction in piece)
    if not tied and not scalars and not reduces:
        return [list(piece) for piece in pieces]
    waiting: list[Step] = []
    put_off: list[list[Work]] = []
    for piece in pieces:
        work: list[Work] = []
        for instruction in piece:
            match instruction:
                case ReduceGradient():
                    work += [*waiting, instruction]
                    waiting = []
                case Step(_, version) if waiting and waiting[-1].version == version:
                    waiting.append(instruction)
                case Step():
                    work += [*waiting, *map(ReduceTied, tied)]
                    work += [SyncScalars()] if scalars else []
                    waiting = [instruction]
                case Forward(_, _, int(version)) if waiting and waiting[-1].version <= version:
                    work += [*waiting, instruction]
                    waiting = []
                case _:
                    work.append(instruction)
        put_off.append(work)
    put_off[-1] += waiting
    return put_off


def _stages_of(pieces: Sequence[Sequence[Work]]) -> list[int]:
    """The stages that a rank updates."""
    return sorted({instruction.stage for piece in pieces for instruction in piece if isinstance(instruction, Step)})
