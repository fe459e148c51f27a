"""Every microbatch is forwarded and backwarded exactly once on every stage, by the rank that owns it."""

from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.program import Program
from stagewright.schedules.proof.report import at_row
from stagewright.schedules.table import RECEIVE_GRADIENT


def check_completeness(program: Program) -> None:
    """Refuse what is computed twice, never, or in the wrong place."""
    table = program.table
    if table.outside:
        raise ScheduleError(
            f"{at_row(program, table.outside[0])} names a stage or microbatch that does not exist: there are "
            f"{table.num_stages} stages and {table.num_microbatches} microbatches",
            "unknown stage or microbatch",
        )
    if table.repeated:
        raise ScheduleError(f"{at_row(program, table.repeated[0])} is done a second time", "duplicate")
    for what, rows in (("F", table.forward), ("B or I", table.input_gradient), ("B or W", table.weight_gradient)):
        if -1 in rows:
            stage, microbatch = divmod(rows.index(-1), table.num_microbatches)
            raise ScheduleError(f"microbatch {microbatch} has no {what} on stage {stage}", "missing compute")
    routes = [
        table.placement.routes[table.placement.route_of(microbatch)] for microbatch in range(table.num_microbatches)
    ]
    for row, (operation, stage, microbatch) in enumerate(zip(table.operation, table.stage, table.microbatch)):
        if operation <= RECEIVE_GRADIENT and routes[microbatch][stage] != table.rank[row]:
            raise ScheduleError(
                f"{at_row(program, row)} belongs on rank {routes[microbatch][stage]}, which owns stage {stage}",
                "placement",
            )
