"""The data-parallel pass: where the gradients of every stage are summed over the replicas of the whole pipeline."""

from dataclasses import replace

from stagewright.schedules.instructions import Instruction, ReduceGradient, SendActivation, SendGradient, Step
from stagewright.schedules.program import Program, Stream
from stagewright.schedules.updates import stages_finished


def insert_reductions(program: Program) -> Program:
    """Add a REDUCE_GRAD before each STEP that has none.

    It stands right behind the last gradient that the update needs, and the SEND of that, so that the sum goes on during
    the cooldown.

    Args:
        program: with its STEPs.
    """
    return replace(program, streams=tuple(map(_insert, program.streams)))


def _insert(stream: Stream) -> Stream:
    """Go through a stream backwards: an update's last gradient is then the first one met."""
    reversed_stream: list[Instruction] = []
    wanted: list[int] = []
    for instruction in reversed(stream):
        match instruction:
            case Step(stage):
                wanted.append(stage)
            case ReduceGradient(stage) if stage in wanted:
                wanted.remove(stage)
            case _:
                for stage in stages_finished(instruction):
                    if stage in wanted:
                        reversed_stream.insert(_before_sends(reversed_stream), ReduceGradient(stage))
                        wanted.remove(stage)
        reversed_stream.append(instruction)
    return tuple(reversed([*reversed_stream, *map(ReduceGradient, wanted)]))


def _before_sends(reversed_stream: list[Instruction]) -> int:
    """Where something goes that comes right after the sends which stand at the end."""
    index = len(reversed_stream)
    while index and isinstance(reversed_stream[index - 1], SendActivation | SendGradient):
        index -= 1
    return index
