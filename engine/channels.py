"""Channels: the one-way lines that a program uses, and how far ahead of need it posts its receives."""

from stagewright.engine.transport.contract import Channel, Line
from stagewright.schedules import Program
from stagewright.schedules.instructions import (
    Backward,
    Forward,
    InputGradient,
    Instruction,
    Overlap,
    ReceiveActivation,
    ReceiveGradient,
)


def channels_of(program: Program) -> dict[Line, Channel]:
    """All channels of a program, by (source, destination, kind)."""
    channels: dict[Line, Channel] = {}
    for receiver, stream in enumerate(program.streams):
        for line, depth in _depths(program, receiver, stream).items():
            channels[line] = Channel(*line, depth)
    return channels


def _depths(program: Program, rank: int, stream: tuple[Instruction, ...]) -> dict[Line, int]:
    """For each channel into a rank, how many messages at most lie between the oldest unconsumed one and the newest."""
    posted: dict[tuple[bool, int, int], tuple[Line, int]] = {}
    outstanding: dict[Line, list[int]] = {}
    num_posted: dict[Line, int] = {}
    depths: dict[Line, int] = {}
    for instruction in stream:
        if isinstance(instruction, ReceiveActivation | ReceiveGradient):
            forward = isinstance(instruction, ReceiveActivation)
            neighbour = instruction.stage + (-1 if forward else 1)
            source = program.placement.rank_of(neighbour, instruction.microbatch)
            line: Line = (source, rank, "activation" if forward else "gradient")
            index = num_posted.get(line, 0)
            num_posted[line] = index + 1
            waiting = outstanding.setdefault(line, [])
            waiting.append(index)
            depths[line] = max(depths.get(line, 1), index - waiting[0] + 1)
            posted[forward, instruction.stage, instruction.microbatch] = (line, index)
            continue
        for key in _consumed(instruction):
            if key in posted:
                line, index = posted.pop(key)
                outstanding[line].remove(index)
    return depths


def _consumed(instruction: Instruction) -> list[tuple[bool, int, int]]:
    """The messages (activation or gradient, stage, microbatch) that an instruction waits for."""
    match instruction:
        case Forward(stage, microbatch):
            return [(True, stage, microbatch)]
        case Backward(stage, microbatch) | InputGradient(stage, microbatch):
            return [(False, stage, microbatch)]
        case Overlap(forward, backward):
            return _consumed(forward) + _consumed(backward)
        case _:
            return []
