"""No circular wait: there is an order in which every rank can run its whole stream."""

from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.linearize import Stuck, linearize, waits_of
from stagewright.schedules.program import Program
from stagewright.schedules.proof.report import at_row


def check_deadlock(program: Program, *, rendezvous: bool) -> None:
    """Refuse a circular wait, and show the circle rank by rank."""
    table = program.table
    waits = waits_of(table, rendezvous=rendezvous)
    order = linearize(table, waits)
    if isinstance(order, Stuck):
        lines = []
        for rank, row in order.blocked.items():
            awaited = [other for other in waits.of(row) if other >= order.blocked.get(table.rank[other], len(table))]
            lines += [f"  {at_row(program, row)} waits for {at_row(program, other)}" for other in awaited[:1]]
        kind = "rendezvous" if rendezvous else "buffered"
        raise ScheduleError(
            f"under {kind} sends these ranks wait for each other:\n" + "\n".join(lines), "circular wait"
        )
