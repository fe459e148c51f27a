"""Gradients are summed over replicas and over tied stages once they are complete, and before they are applied.

The j-th REDUCE_GRAD of a stage on a rank belongs to update j, whose STEP makes version j; likewise the j-th
REDUCE_TIED of a stage, and the j-th SYNC_SCALARS of a rank.
"""

from collections.abc import Iterable, Sequence

from stagewright.schedules.program import Program
from stagewright.schedules.proof.report import at_row, refusal
from stagewright.schedules.table import REDUCE_GRADIENT, REDUCE_TIED, STEP, SYNC_SCALARS


def check_reductions(program: Program) -> None:
    """Refuse a reduction that comes too early, too late, not at all, or once too often.

    A stage with several replicas needs one before every STEP; a stage with one needs it where it has any,
    since data parallelism beyond the pipeline is not part of a program.
    """
    table = program.table
    steps, scalars = table.rows_of(STEP), table.rows_of(SYNC_SCALARS)
    reductions, tied = table.rows_of(REDUCE_GRADIENT), table.rows_of(REDUCE_TIED)
    replicated = {here for here in steps if len(table.placement.replicas_of(here[1])) > 1}
    concerned = set(steps) if scalars else replicated | set(reductions) | set(tied)
    complete = _last_gradients(program, {stage for _, stage in concerned})
    for here in sorted(replicated | set(reductions)):
        _check_turns(program, reductions.get(here, ()), complete[here], steps[here], "REDUCE_GRAD")
    for here in sorted(tied):
        _check_turns(program, tied[here], complete[here], steps[here], "REDUCE_TIED")
    if scalars:
        for rank in range(program.num_ranks):
            own = [(rank, stage) for stage in table.placement.stages_of(rank)]
            summed = [rows[here] for rows in (complete, reductions, tied) for here in own if here in rows]
            _check_turns(
                program,
                scalars.get((rank, -1), ()),
                [max(rows) for rows in zip(*summed)],
                [min(rows) for rows in zip(*(steps[here] for here in own))],
                "SYNC_SCALARS",
            )


def _last_gradients(program: Program, stages: Iterable[int]) -> dict[tuple[int, int], list[int]]:
    """By rank and stage, for each update the row of its last gradient there, -1 where it has none."""
    table = program.table
    width, per_update = table.num_microbatches, program.updates.microbatches_per_update
    last: dict[tuple[int, int], list[int]] = {}
    for stage in stages:
        for rank in table.placement.replicas_of(stage):
            last[rank, stage] = [-1] * (width // per_update)
        for microbatch, row in enumerate(table.weight_gradient[stage * width : (stage + 1) * width]):
            rows, turn = last[table.rank[row], stage], microbatch // per_update
            rows[turn] = max(rows[turn], row)
    return last


def _check_turns(
    program: Program, reductions: Sequence[int], complete: Sequence[int], steps: Sequence[int], kind: str
) -> None:
    """For each turn: all that it sums, then its reduction, then its STEP."""
    for turn, row in enumerate(reductions):
        if turn >= len(steps):
            message = f"{at_row(program, row)} has nothing to sum: all {len(steps)} updates have theirs already"
            raise refusal(program, "leftover", message, row)
        if row < complete[turn]:
            message = f"{at_row(program, row)}, for version {turn + 1}, comes before {at_row(program, complete[turn])}"
            raise refusal(program, "reduction too early", message, row, complete[turn])
    for turn, step in enumerate(steps):
        if turn >= len(reductions) or reductions[turn] > step:
            message = f"{at_row(program, step)} has no {kind} before it"
            raise refusal(program, "reduction missing", message, step, *reductions[turn : turn + 1])
