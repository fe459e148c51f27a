"""Updates are counted: each stage's STEPs make version 1, 2, 3, … on every rank that owns it."""

from stagewright.schedules.program import Program
from stagewright.schedules.proof.report import at_row, refusal
from stagewright.schedules.table import STEP


def check_steps(program: Program) -> None:
    """Refuse a STEP that leaves out a version or makes one again."""
    table = program.table
    for rows in table.rows_of(STEP).values():
        for turn, row in enumerate(rows):
            if table.version[row] != turn + 1:
                message = f"{at_row(program, row)} should make version {turn + 1}, the one after version {turn}"
                raise refusal(program, "step order", message, row, *rows[max(turn - 1, 0) : turn])
