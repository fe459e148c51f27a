"""The update pass: where gradients are reduced and where the optimizer makes the next weight version."""

from collections.abc import Sequence
from dataclasses import replace

from stagewright.schedules.instructions import (
    Backward,
    Computation,
    Forward,
    InputGradient,
    Instruction,
    Overlap,
    ReduceGradient,
    Step,
    WeightGradient,
)
from stagewright.schedules.placement import Placement
from stagewright.schedules.program import Program


def update_after_batch(
    order: Sequence[Computation | Overlap], placement: Placement, rank: int, version: int
) -> list[Instruction]:
    """One batch of a synchronous schedule: reduce as early as possible, update once everything is done.

    The gradient of a stage with several copies is summed over them as soon as this rank is done with it, so
    that the sum travels during the cooldown, and in falling order of stages on every rank: two ranks that
    share two stages would otherwise wait for each other. The STEPs stand together at the end, where one
    optimizer can serve all the rank's stages.
    """
    stages = placement.stages_of(rank)
    last = {stage: index for index, instruction in enumerate(order) for stage in stages_finished(instruction)}
    updated: list[Instruction] = []
    start = 0
    for stage in reversed(stages):
        if len(placement.replicas_of(stage)) > 1:
            # A rank that computes nothing on one of its stages still takes part in the sum.
            end = max(start, last.get(stage, len(order) - 1) + 1)
            updated += [*order[start:end], ReduceGradient(stage)]
            start = end
    return [*updated, *order[start:], *(Step(stage, version) for stage in stages)]


def stages_finished(instruction: Instruction) -> tuple[int, ...]:
    """The stage whose weight gradient an instruction adds to, if it does."""
    match instruction:
        case Backward(stage) | WeightGradient(stage):
            return (stage,)
        case Overlap(_, backward):
            return (backward.stage,)
        case _:
            return ()


def has_updates(program: Program) -> bool:
    """Whether a program says when weights change."""
    return any(isinstance(instruction, Step) for stream in program.streams for instruction in stream)


def append_updates(program: Program) -> Program:
    """Add the updates to an imported program that has none: each once its rank is through with all of its microbatches.

    Reductions that the program has stay where they are; those of replicated stages that have none stand
    right before their STEPs.
    """
    return replace(program, streams=tuple(_append_to_stream(program, rank) for rank in range(program.num_ranks)))


def _append_to_stream(program: Program, rank: int) -> tuple[Instruction, ...]:
    stream, stages = program.streams[rank], program.placement.stages_of(rank)
    reduced = {instruction.stage for instruction in stream if isinstance(instruction, ReduceGradient)}
    replicated = [stage for stage in stages if len(program.placement.replicas_of(stage)) > 1]
    per_update = program.updates.microbatches_per_update
    num_updates = program.num_microbatches * program.num_batches // per_update
    last_gradient = {
        microbatch // per_update: position
        for position, instruction in enumerate(stream)
        for microbatch in _gradients_of(instruction)
    }
    updated: list[Instruction] = []
    version = 0
    for position, instruction in enumerate((*stream, None)):
        # Before what is computed next, so that nothing comes between a gradient and its SEND.
        if instruction is None or isinstance(instruction, _COMPUTING):
            while version < num_updates and last_gradient.get(version, len(stream) - 1) < position:
                version += 1
                updated += [ReduceGradient(stage) for stage in replicated if stage not in reduced]
                updated += [Step(stage, version) for stage in stages]
        if instruction is not None:
            updated.append(instruction)
    return tuple(updated)


_COMPUTING = (Forward, InputGradient, WeightGradient, Backward, Overlap)


def _gradients_of(instruction: Instruction) -> tuple[int, ...]:
    """The microbatch whose weight gradient an instruction makes, if it does."""
    match instruction:
        case Backward(_, microbatch) | WeightGradient(_, microbatch):
            return (microbatch,)
        case Overlap(_, backward):
            return (backward.microbatch,)
        case _:
            return ()
