"""The update pass: where gradients are reduced and where the optimizer makes the next weight version."""

from collections.abc import Sequence

from stagewright.schedules.instructions import (
    Backward,
    Computation,
    Instruction,
    Overlap,
    ReduceGradient,
    Step,
    WeightGradient,
)
from stagewright.schedules.placement import Placement


def update_after_batch(
    order: Sequence[Computation | Overlap], placement: Placement, rank: int, version: int
) -> list[Instruction]:
    """One batch of a synchronous schedule: reduce as early as possible, update once everything is done.

    The gradient of a stage with several copies is summed over them right after the stage's last backward
    here, so that the sum travels during the cooldown; the STEPs stand together at the end, where one
    optimizer can serve all the rank's stages.
    """
    stages = placement.stages_of(rank)
    last = {stage: index for index, instruction in enumerate(order) for stage in stages_finished(instruction)}
    replicated = {index: stage for stage, index in last.items() if len(placement.replicas_of(stage)) > 1}
    updated: list[Instruction] = []
    for index, instruction in enumerate(order):
        updated.append(instruction)
        if index in replicated:
            updated.append(ReduceGradient(replicated[index]))
    return updated + [Step(stage, version) for stage in stages]


def stages_finished(instruction: Computation | Overlap) -> tuple[int, ...]:
    """The stage whose weight gradient an instruction adds to, if it does."""
    match instruction:
        case Backward(stage) | WeightGradient(stage):
            return (stage,)
        case Overlap(_, backward):
            return (backward.stage,)
        case _:
            return ()
