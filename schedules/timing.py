"""Timing: the clock of the simulation, one pass over the rows of a program in a possible order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from stagewright.schedules.costs import Costs, StageCosts
from stagewright.schedules.linearize import Waits
from stagewright.schedules.table import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    OVERLAP,
    REDUCE_GRADIENT,
    REDUCE_TIED,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    STEP,
    SYNC_SCALARS,
    WEIGHT_GRADIENT,
    Table,
)

Channel: TypeAlias = tuple[int, int, int]  # source, destination, operation

# What goes on while its rank issues the next instruction.
ASYNCHRONOUS: Final = frozenset((SEND_ACTIVATION, SEND_GRADIENT, REDUCE_GRADIENT, REDUCE_TIED, SYNC_SCALARS))


@dataclass(frozen=True)
class RowCosts:
    """What each row of a table takes.

    Args:
        durations: one entry a row. A send's is the time from leaving to arrival. The forward of a fused pair stands
            for the whole pair, the backward for nothing.
        transfers: how long each send keeps its channel, one entry a row; empty where channels are never busy.
    """

    durations: Sequence[float]
    transfers: Sequence[float] = ()


@dataclass
class Clocks:
    """Until when each rank and each channel is busy; all are idle from 0 on at first."""

    ranks: list[float]
    left: dict[Channel, float] = field(default_factory=dict)
    arrived: dict[Channel, float] = field(default_factory=dict)


def row_costs(table: Table, costs: Costs) -> RowCosts:
    """Look up what each row takes."""
    stages = costs.of_stages(table.num_stages)
    nothing = (0.0,) * table.num_stages
    by_operation = [nothing] * (OVERLAP + 1)
    by_operation[FORWARD] = stages.forward
    by_operation[INPUT_GRADIENT] = stages.input_gradient
    by_operation[WEIGHT_GRADIENT] = stages.weight_gradient
    by_operation[BACKWARD] = stages.backward
    by_operation[STEP] = stages.step
    by_operation[REDUCE_GRADIENT] = by_operation[REDUCE_TIED] = stages.reduce
    by_operation[SYNC_SCALARS] = (max(stages.send),) * table.num_stages
    in_flight = tuple(latency + transfer for latency, transfer in zip(stages.send, stages.transfer))
    by_operation[SEND_ACTIVATION], by_operation[SEND_GRADIENT] = in_flight, _from_above(in_flight)
    durations = _look_up(table, by_operation)
    for row in table.fused:
        pair = durations[row] + durations[row + 1]
        durations[row] = pair if stages.overlapped is None else stages.overlapped[table.stage[row]]
        durations[row + 1] = 0.0
    return RowCosts(durations, _transfers(table, stages))


def measured_costs(table: Table, costs: Costs, starts: Sequence[float], ends: Sequence[float]) -> RowCosts:
    """What each row of a timeline took; ``costs`` say how long a send keeps its channel."""
    durations = [end - start for start, end in zip(starts, ends)]
    for row in table.fused:
        durations[row + 1] = 0.0
    return RowCosts(durations, _transfers(table, costs.of_stages(table.num_stages)))


def _transfers(table: Table, stages: StageCosts) -> Sequence[float]:
    """How long each send keeps its channel; nothing where no message is ever in another's way."""
    if not any(stages.transfer) and len(set(stages.send)) == 1:
        return ()
    by_operation = [(0.0,) * table.num_stages] * (OVERLAP + 1)
    by_operation[SEND_ACTIVATION], by_operation[SEND_GRADIENT] = stages.transfer, _from_above(stages.transfer)
    return _look_up(table, by_operation)


def _look_up(table: Table, by_operation: Sequence[Sequence[float]]) -> list[float]:
    if table.outside:  # an illegal program, which another rule refuses by name
        padding = (0.0,) * (1 + max(table.stage))
        by_operation = [(*of_stages, *padding) for of_stages in by_operation]
    return [by_operation[operation][stage] for operation, stage in zip(table.operation, table.stage)]


def _from_above(of_boundary: Sequence[float]) -> tuple[float, ...]:
    """A gradient of stage s crosses the boundary of stage s - 1."""
    return (0.0, *of_boundary[:-1])


def time_rows(
    table: Table, waits: Waits, order: Sequence[int], costs: RowCosts, clocks: Clocks | None = None
) -> tuple[list[float], list[float]]:
    """Start and end of every row, in a possible order of all of them.

    A send starts when its message leaves and ends when it arrives at the other rank; a gradient reduction starts
    when all replicas have come to it. Neither keeps its rank from going on.

    Args:
        table, waits, order: the rows, what they wait for, and an order in which they can run.
        costs: what they take.
        clocks: until when ranks and channels are busy; moved on.
    """
    clocks = clocks or Clocks([0.0] * table.num_ranks)
    clock, durations = clocks.ranks, costs.durations
    starts, ends = [0.0] * len(table), [0.0] * len(table)
    reductions: dict[tuple[int, int], int] = {}
    rank_of, operation_of = table.rank, table.operation
    first, more, fused = waits.first, waits.more, table.fused
    for row in order:
        rank, operation = rank_of[row], operation_of[row]
        start = clock[rank]
        if operation in ASYNCHRONOUS:
            if operation == REDUCE_GRADIENT:
                reductions[rank, table.stage[row]] = row
            if costs.transfers and operation in (SEND_ACTIVATION, SEND_GRADIENT):
                starts[row], ends[row] = _transfer(table, row, start, costs, clocks)
            else:
                starts[row], ends[row] = start, start + durations[row]
            continue
        if row - 1 in fused:
            starts[row], ends[row] = starts[row - 1], start
            continue
        awaited = first[row]
        if awaited >= 0 and ends[awaited] > start:
            start = ends[awaited]
        if row in more:
            start = max(start, *(ends[other] for other in more[row]))
        if operation == STEP and (own := reductions.pop((rank, table.stage[row]), -1)) >= 0:
            together = [other for other in more.get(row, ()) if operation_of[other] == REDUCE_GRADIENT]
            start = max(start, _reduce([own, *together], starts, ends, durations))
        starts[row] = start
        ends[row] = clock[rank] = start + durations[row]
    return starts, ends


def _transfer(table: Table, row: int, ready: float, costs: RowCosts, clocks: Clocks) -> tuple[float, float]:
    """When a message leaves and arrives: after those before it on its channel."""
    channel = channel_of(table, row)
    start = max(ready, clocks.left.get(channel, ready))
    end = max(start + costs.durations[row], clocks.arrived.get(channel, start))
    clocks.left[channel] = start + costs.transfers[row]
    clocks.arrived[channel] = end
    return start, end


def channel_of(table: Table, row: int) -> Channel:
    """The channel on which a send goes."""
    operation, stage = table.operation[row], table.stage[row]
    next_stage = stage + 1 if operation == SEND_ACTIVATION else stage - 1
    return table.rank[row], table.placement.rank_of(next_stage, table.microbatch[row]), operation


def _reduce(rows: Sequence[int], starts: list[float], ends: list[float], durations: Sequence[float]) -> float:
    """When a reduction over replicas is done: all begin it when the last has come to it."""
    start = max(starts[row] for row in rows)
    end = start + max(durations[row] for row in rows)
    for row in rows:
        starts[row], ends[row] = start, end
    return end
