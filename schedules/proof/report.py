"""How a refusal looks: it names each instruction with its place, and draws the streams around them."""

from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.program import Program
from stagewright.schedules.proof.grid import Missing, grid_around


def at_row(program: Program, row: int) -> str:
    """An instruction with its place: ``rank 2: 2SEND_F1 (instruction 7)``."""
    rank, position = program.table.rank[row], program.table.position[row]
    return f"rank {rank}: {program.streams[rank][position]} (instruction {position})"


def refusal(program: Program, rule: str, message: str, *rows: int, missing: Missing | None = None) -> ScheduleError:
    """The error of a broken rule.

    Args:
        program: what breaks the rule.
        rule: the rule's short name.
        message: what is wrong, in words.
        rows: the rows to mark in the grid, the offence first.
        missing: what should be there and is not.
    """
    return ScheduleError(f"{message}\n\n{grid_around(program, rows, missing)}", rule)
