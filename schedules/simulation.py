"""Simulation: when each instruction of a program starts and ends, given what each kind costs.

Semantics are those of the real run: every rank issues its stream in order and computes one thing at a
time; sends never block it; a forward or backward starts once its input has arrived; each channel
(source, destination, direction) delivers in order.
"""

from stagewright.schedules.communication import communicates, insert_communication
from stagewright.schedules.costs import Costs
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.linearize import Stuck, linearize, waits_of
from stagewright.schedules.program import Program
from stagewright.schedules.timeline import Timeline
from stagewright.schedules.timing import row_costs, time_rows


def simulate(program: Program, costs: Costs | None = None) -> Timeline:
    """Predict the timeline of a program.

    Args:
        program: any legal program; one without communication gets it inserted first.
        costs: durations; by default F = I = W = 1 and B = 2, with sends that take no time.

    Raises:
        ScheduleError: the program can never finish.
    """
    if not communicates(program):
        program = insert_communication(program)
    costs = costs or Costs()
    table = program.table
    waits = waits_of(table)
    order = linearize(table, waits)
    if isinstance(order, Stuck):
        raise ScheduleError(
            "the program never finishes; verify(program) tells which ranks wait for each other", "circular wait"
        )
    starts, ends = time_rows(table, waits, order, row_costs(table, costs))
    return Timeline(program, costs, tuple(starts), tuple(ends))
