"""STEP number v of a stage applies exactly the gradients of its U microbatches (v-1)U .. vU-1 on its rank."""

from stagewright.schedules.instructions import Step
from stagewright.schedules.program import Program
from stagewright.schedules.proof.grid import Missing
from stagewright.schedules.proof.report import at_row, refusal
from stagewright.schedules.table import STEP


def check_gradients(program: Program) -> None:
    """Refuse a STEP that comes before its gradients, gradients that have no buffer yet, and those never applied."""
    table, rule = program.table, program.updates
    per_update, buffers, width = rule.microbatches_per_update, rule.num_gradient_buffers, table.num_microbatches
    steps = table.rows_of(STEP)
    _check_counts(program, steps)
    for stage in range(table.num_stages):
        for microbatch, row in enumerate(table.weight_gradient[stage * width : (stage + 1) * width]):
            rows, turn = steps[table.rank[row], stage], microbatch // per_update
            if row > rows[turn]:
                message = (
                    f"{at_row(program, rows[turn])} applies the gradient of {at_row(program, row)}, which is later"
                )
                raise refusal(program, "gradient missing", message, rows[turn], row)
            if turn >= buffers and row < rows[turn - buffers]:
                free = rows[turn - buffers]
                message = (
                    f"{at_row(program, row)} adds to the gradients of version {turn + 1} before "
                    f"{at_row(program, free)} frees one of {buffers} gradient buffer(s)"
                )
                raise refusal(program, "gradient buffer", message, row, free)


def _check_counts(program: Program, steps: dict[tuple[int, int], list[int]]) -> None:
    """Every stage has as many STEPs as its microbatches fill, on each of its ranks, and no microbatch is left over."""
    table, per_update = program.table, program.updates.microbatches_per_update
    num_updates, left = divmod(table.num_microbatches, per_update)
    for stage in range(table.num_stages):
        for rank in table.placement.replicas_of(stage):
            rows = steps.get((rank, stage), [])
            if len(rows) > num_updates:
                message = (
                    f"{at_row(program, rows[num_updates])} has no gradients to apply: {table.num_microbatches} "
                    f"microbatches, {per_update} an update, make {num_updates} update(s)"
                )
                raise refusal(program, "gradient missing", message, rows[num_updates])
            if len(rows) < num_updates:
                first = len(rows) * per_update
                message = (
                    f"the gradients of microbatches {first}..{first + per_update - 1} on stage {stage} are never "
                    f"applied: rank {rank} has {len(rows)} of {num_updates} STEPs"
                )
                missing = Missing(rank, len(program.streams[rank]), Step(stage, len(rows) + 1))
                raise refusal(program, "leftover", message, missing=missing)
    if left:
        message = (
            f"the gradients of the last {left} microbatch(es) are never applied: {table.num_microbatches} is no whole "
            f"number of updates of {per_update}"
        )
        row = table.weight_gradient[table.num_microbatches - left]
        raise refusal(program, "leftover", message, row)
