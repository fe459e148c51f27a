"""Every microbatch is forwarded and backwarded exactly once on every stage."""

from stagewright.schedules.instructions import Backward, Forward, InputGradient, Instruction, WeightGradient
from stagewright.schedules.program import Program
from stagewright.schedules.proof.grid import Missing
from stagewright.schedules.proof.report import at_row, refusal
from stagewright.schedules.table import BACKWARD


def check_completeness(program: Program) -> None:
    """Refuse what is computed a second time or never; what has no W or B leaves its stash behind."""
    table = program.table
    for row in table.repeated:
        if table.operation[row] <= BACKWARD:
            first = _first_time(program, row)
            raise refusal(
                program,
                "duplicate compute",
                f"{at_row(program, row)} does again what {at_row(program, first)} did",
                row,
                first,
            )
    for what, rows in (("F", table.forward), ("B or I", table.input_gradient), ("B or W", table.weight_gradient)):
        if -1 in rows:
            key = rows.index(-1)
            stage, microbatch = divmod(key, table.num_microbatches)
            rank = table.placement.rank_of(stage, microbatch)
            missing = Missing(rank, _place(program, rank, rows, key), _absent(program, key))
            raise refusal(
                program,
                "missing compute",
                f"microbatch {microbatch} has no {what} on stage {stage}, which is on rank {rank}",
                missing=missing,
            )


def _first_time(program: Program, row: int) -> int:
    """The row that did first what a repeated row does."""
    table = program.table
    key = table.stage[row] * table.num_microbatches + table.microbatch[row]
    done = (table.forward[key], table.input_gradient[key], table.weight_gradient[key])
    if table.operation[row] == BACKWARD:
        return next(first for first in done[1:] if first != row)
    return done[table.operation[row]]


def _absent(program: Program, key: int) -> Instruction:
    """What a (stage, microbatch) lacks."""
    table = program.table
    stage, microbatch = divmod(key, table.num_microbatches)
    if table.forward[key] < 0:
        return Forward(stage, microbatch)
    if table.input_gradient[key] < 0:
        return (Backward if table.weight_gradient[key] < 0 else InputGradient)(stage, microbatch)
    return WeightGradient(stage, microbatch)


def _place(program: Program, rank: int, rows: list[int], key: int) -> int:
    """Where it should stand: behind the same thing for the microbatch before, or behind what it follows on."""
    table = program.table
    before = [rows[key - 1]] if key % table.num_microbatches else []
    for row in (*before, table.input_gradient[key], table.forward[key]):
        if row >= 0 and table.rank[row] == rank:
            return table.position[row] + 1
    return 0
