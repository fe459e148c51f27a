"""Steady period: what one batch takes when batches follow each other without end."""

from collections.abc import Sequence
from math import isclose

from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.linearize import linearize, waits_of
from stagewright.schedules.program import Program
from stagewright.schedules.table import BACKWARD, FORWARD
from stagewright.schedules.timing import Clocks, RowCosts, time_rows

# Repetitions after which a pattern that never comes back is averaged instead; known schedules need one or two.
_MOST_REPETITIONS = 40


def repeated_period(program: Program, costs: RowCosts) -> float:
    """The time per batch of a program that every rank begins anew as soon as it is through with it.

    No rank waits for another at the seam; they only ever wait for data. The clocks are moved on, pass by pass, until
    all of them have advanced by the same time over some number of passes: from then on this goes on for ever.
    """
    table = program.table
    waits = waits_of(table)
    order = linearize(table, waits)
    assert isinstance(order, list), "the program was simulated before"
    clocks = Clocks([0.0] * table.num_ranks)
    seams: list[list[float]] = []
    for _ in range(_MOST_REPETITIONS):
        time_rows(table, waits, order, costs, clocks)
        seam = [*clocks.ranks, *clocks.left.values(), *clocks.arrived.values()]
        for passes, earlier in enumerate(reversed(seams), 1):
            if _advanced_alike(earlier, seam):
                return (seam[0] - earlier[0]) / passes / program.num_batches
        seams.append(seam)
    passes = _MOST_REPETITIONS // 2
    return max(new - old for old, new in zip(seams[-1 - passes], seams[-1])) / passes / program.num_batches


def _advanced_alike(earlier: Sequence[float], later: Sequence[float]) -> bool:
    """Whether all clocks have moved on by the same time, so that each is where it was in relation to the others."""
    advance = later[0] - earlier[0]
    return all(isclose(new - old, advance, rel_tol=1e-9, abs_tol=1e-9 * new) for old, new in zip(earlier, later))


def overlapping_period(program: Program, ends: Sequence[float]) -> float:
    """The time per batch of a program that goes on from batch to batch without a flush.

    The slowest rank's time from the end of one batch to the end of a later one; the last batch is left out, since it
    drains, and so is the first half, in which the pipeline fills.

    Raises:
        ScheduleError: there are fewer than three batches.
    """
    num_batches = program.num_batches
    if num_batches < 3:
        raise ScheduleError(
            f"{num_batches} batch(es) of an asynchronous schedule do not show what a batch takes once the pipeline is "
            "full; simulate schedule.program(steps=3) or more"
        )
    table = program.table
    first, last = (num_batches - 2) // 2, num_batches - 2
    completed = [[0.0] * num_batches for _ in range(table.num_ranks)]
    for row, (operation, microbatch) in enumerate(zip(table.operation, table.microbatch)):
        if operation <= BACKWARD:
            completed[table.rank[row]][microbatch // program.num_microbatches] = ends[row]
    return max(batches[last] - batches[first] for batches in completed) / (last - first)


def batches_overlap(program: Program) -> bool:
    """Whether some rank begins a batch before it is through with the one before, or would, had it more than one."""
    if program.num_batches == 1:
        return program.updates.max_staleness > 0
    table = program.table
    newest = [0] * table.num_ranks
    for row, (operation, microbatch) in enumerate(zip(table.operation, table.microbatch)):
        if operation <= BACKWARD:
            rank, batch = table.rank[row], microbatch // program.num_microbatches
            if operation == FORWARD:
                newest[rank] = max(newest[rank], batch)
            elif batch < newest[rank]:
                return True
    return False
