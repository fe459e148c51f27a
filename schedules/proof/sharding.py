"""A stage whose parameters are gathered and freed is gathered when it computes, and freed in the end."""

from stagewright.schedules.program import Program
from stagewright.schedules.proof.report import at_row, refusal
from stagewright.schedules.table import BACKWARD, RESHARD, UNSHARD


def check_sharding(program: Program) -> None:
    """Refuse UNSHARD of what is gathered, RESHARD of what is not, computing on what is not, and UNSHARD left open.

    A stage without either on a rank is not sharded there.
    """
    table = program.table
    sharded = {*table.rows_of(UNSHARD), *table.rows_of(RESHARD)}
    if not sharded:
        return
    gathered: dict[tuple[int, int], int] = {}
    for row, (rank, operation, stage) in enumerate(zip(table.rank, table.operation, table.stage)):
        here = (rank, stage)
        if here not in sharded:
            continue
        if operation == UNSHARD:
            if here in gathered:
                message = f"{at_row(program, row)} gathers what {at_row(program, gathered[here])} gathered already"
                raise refusal(program, "sharding", message, row, gathered[here])
            gathered[here] = row
        elif operation == RESHARD:
            if here not in gathered:
                raise refusal(program, "sharding", f"{at_row(program, row)} frees what is not gathered", row)
            del gathered[here]
        elif operation <= BACKWARD and here not in gathered:
            message = f"{at_row(program, row)} computes with the parameters of stage {stage}, which are not gathered"
            raise refusal(program, "sharding", message, row)
    for row in gathered.values():
        raise refusal(program, "leftover", f"what {at_row(program, row)} gathers is never freed", row)
