"""The agreement pass: where ranks sum the gradients of tied weights, and agree on what no rank knows alone."""

from collections.abc import Iterable
from dataclasses import replace

from stagewright.schedules.instructions import Instruction, ReduceGradient, ReduceTied, Step, SyncScalars
from stagewright.schedules.program import Program, Stream
from stagewright.schedules.updates import stages_finished


def insert_agreements(program: Program, *, tied_stages: Iterable[int] = (), scalars: bool = False) -> Program:
    """Add REDUCE_TIED and SYNC_SCALARS to a program that updates without them.

    A tied stage's gradient starts on its way as soon as this rank has all of it. The scalars (gradient norm, overflow,
    the count of what the loss averages over) are agreed on right before the first STEP of each update.

    Args:
        program: with its STEPs.
        tied_stages: stages that share a weight with another stage.
        scalars: whether an update needs a value that depends on every rank.
    """
    tied = frozenset(tied_stages)
    streams = []
    for stream in program.streams:
        with_tied = _insert_tied(stream, tied)
        streams.append(_insert_scalars(with_tied) if scalars else with_tied)
    return replace(program, streams=tuple(streams))


def _insert_tied(stream: Stream, tied: frozenset[int]) -> Stream:
    """Go through a stream backwards: an update's last gradient is then the first one met."""
    reversed_stream: list[Instruction] = []
    wanted: set[int] = set()
    for instruction in reversed(stream):
        if isinstance(instruction, Step) and instruction.stage in tied:
            wanted.add(instruction.stage)
        for stage in _completes(instruction) & wanted:
            reversed_stream.append(ReduceTied(stage))
            wanted.discard(stage)
        reversed_stream.append(instruction)
    return tuple(reversed(reversed_stream))


def _insert_scalars(stream: Stream) -> Stream:
    """Before the first STEP of each version."""
    agreed: list[Instruction] = []
    version = 0
    for instruction in stream:
        if isinstance(instruction, Step) and instruction.version > version:
            version = instruction.version
            agreed.append(SyncScalars())
        agreed.append(instruction)
    return tuple(agreed)


def _completes(instruction: Instruction) -> set[int]:
    """The stage whose gradient may be complete with an instruction."""
    match instruction:
        case ReduceGradient(stage):
            return {stage}
        case _:
            return set(stages_finished(instruction))
