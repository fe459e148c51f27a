"""Every instruction names a stage and microbatch that exist, and stands on a rank that owns the stage."""

from stagewright.schedules.program import Program
from stagewright.schedules.proof.report import at_row, refusal
from stagewright.schedules.table import RECEIVE_GRADIENT, SYNC_SCALARS


def check_ownership(program: Program) -> None:
    """Refuse what concerns no stage or microbatch of this program, and what another rank should do."""
    table = program.table
    if table.outside:
        row = table.outside[0]
        raise refusal(
            program,
            "unknown stage or microbatch",
            f"{at_row(program, row)} names a stage or microbatch that does not exist: there are "
            f"{table.num_stages} stages and {table.num_microbatches} microbatches",
            row,
        )
    routes = [
        table.placement.routes[table.placement.route_of(microbatch)] for microbatch in range(table.num_microbatches)
    ]
    for row, (rank, operation, stage) in enumerate(zip(table.rank, table.operation, table.stage)):
        if operation <= RECEIVE_GRADIENT:
            owner = routes[table.microbatch[row]][stage]
            if owner != rank:
                raise refusal(
                    program,
                    "placement",
                    f"{at_row(program, row)} belongs on rank {owner}, which owns stage {stage}",
                    row,
                )
    for row in table.others:
        if table.operation[row] != SYNC_SCALARS:
            owners = table.placement.replicas_of(table.stage[row])
            if table.rank[row] not in owners:
                where = " or ".join(map(str, owners))
                raise refusal(
                    program,
                    "placement",
                    f"{at_row(program, row)} belongs on rank {where}, which owns stage {table.stage[row]}",
                    row,
                )
