"""Variants of the training program: forwards alone, to evaluate, and gradients alone, for trainers that step."""

from dataclasses import replace

from stagewright.schedules.communication import insert_communication
from stagewright.schedules.instructions import Forward, Step
from stagewright.schedules.placement import Placement
from stagewright.schedules.program import Program


def forward_only(placement: Placement, num_microbatches: int) -> Program:
    """Every microbatch through every stage, without backward: a wave, stage s of microbatch m at tick s + m.

    Args:
        placement: that of the schedule; of several routes the first is taken by all microbatches.
        num_microbatches: any number, independent of the schedule's.
    """
    route, first = placement.routes[0], Placement(placement.routes, (0,) * num_microbatches)
    cells = sorted(
        (stage + microbatch, microbatch, stage)
        for stage in range(placement.num_stages)
        for microbatch in range(num_microbatches)
    )
    streams = tuple(
        tuple(Forward(stage, microbatch) for _, microbatch, stage in cells if route[stage] == rank)
        for rank in range(placement.num_ranks)
    )
    return insert_communication(Program(streams, first, num_microbatches))


def without_steps(program: Program) -> Program:
    """The same program up to the updates: gradients are left for the trainer to use."""
    streams = (tuple(item for item in stream if not isinstance(item, Step)) for stream in program.streams)
    return replace(program, streams=tuple(streams))
