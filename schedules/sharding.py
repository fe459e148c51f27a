"""The sharding pass: where the parameters of a sharded stage are gathered, and where they are freed."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from stagewright.schedules.instructions import (
    Backward,
    Forward,
    InputGradient,
    Instruction,
    Overlap,
    ReduceGradient,
    Reshard,
    SendActivation,
    SendGradient,
    Step,
    Unshard,
    WeightGradient,
)
from stagewright.schedules.program import Program, Stream


def insert_sharding(program: Program, stages: Iterable[int]) -> Program:
    """Add UNSHARD and RESHARD to a program, for stages that have neither.

    A stage is gathered before its first computation of a batch, and freed after its last one and the reduction of its
    gradient, so that its parameters travel once a batch.

    Args:
        program: with the updates that it has, or without.
        stages: those whose parameters are sharded.
    """
    return replace(program, streams=tuple(_insert(stream, stages) for stream in program.streams))


def _insert(stream: Stream, stages: Iterable[int]) -> Stream:
    done = {instruction.stage for instruction in stream if isinstance(instruction, Unshard | Reshard)}
    before: dict[int, list[Instruction]] = {}
    after: dict[int, list[Instruction]] = {}
    for stage in stages:
        if stage not in done:
            for first, last in _uses(stream, stage):
                before.setdefault(first, []).append(Unshard(stage))
                after.setdefault(last, []).append(Reshard(stage))
    woven: list[Instruction] = []
    for position, instruction in enumerate(stream):
        woven += [*before.get(position, ()), instruction, *after.get(position, ())]
    return tuple(woven)


def _uses(stream: Stream, stage: int) -> list[tuple[int, int]]:
    """The first and the last position at which each batch needs the parameters of a stage."""
    uses: list[tuple[int, int]] = []
    opened: list[int] = []
    for position, instruction in enumerate(stream):
        if isinstance(instruction, Step) and instruction.stage == stage and opened:
            uses.append((opened[0], opened[-1]))
            opened = []
        elif stage in _needs(instruction):
            opened.append(position)
    if opened:
        uses.append((opened[0], opened[-1]))
    return [(first, _behind_sends(stream, last)) for first, last in uses]


def _needs(instruction: Instruction) -> Collection[int]:
    """The stages whose parameters an instruction needs to be there."""
    match instruction:
        case Overlap(forward, backward):
            return (forward.stage, backward.stage)
        case Forward(stage) | Backward(stage) | InputGradient(stage) | WeightGradient(stage):
            return (stage,)
        case ReduceGradient(stage):
            return (stage,)
        case _:
            return ()


def _behind_sends(stream: Stream, position: int) -> int:
    """The position of the last of the sends that follow at once, or this one."""
    while position + 1 < len(stream) and isinstance(stream[position + 1], SendActivation | SendGradient):
        position += 1
    return position
