"""How a refusal names an instruction."""

from stagewright.schedules.program import Program


def at_row(program: Program, row: int) -> str:
    """An instruction with its place: ``rank 2: 2SEND_F1 (instruction 7)``."""
    rank, position = program.table.rank[row], program.table.position[row]
    return f"rank {rank}: {program.streams[rank][position]} (instruction {position})"
