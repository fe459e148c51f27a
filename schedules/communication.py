"""The communication pass: from what each rank computes to what it sends and receives.

A SEND stands right after its producer. A RECV is posted before the instruction that its rank computes
while the producer starts, as found by simulating the computations alone. All ranks can then run in the
order of that simulation with every receive posted before its send begins, so the program stands even
where sends wait for their receiver; and each channel's receives stand in the order of production.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from stagewright.schedules.costs import Costs
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.instructions import (
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from stagewright.schedules.linearize import Stuck, linearize, waits_of
from stagewright.schedules.program import Program
from stagewright.schedules.table import RECEIVE_ACTIVATION, RECEIVE_GRADIENT, SEND_ACTIVATION, SEND_GRADIENT, Table
from stagewright.schedules.timing import time_rows

_OPERATIONS = frozenset((SEND_ACTIVATION, RECEIVE_ACTIVATION, SEND_GRADIENT, RECEIVE_GRADIENT))


def communicates(program: Program) -> bool:
    """Whether a program says what is sent and received, or needs to say nothing since nothing crosses ranks."""
    return not _OPERATIONS.isdisjoint(program.table.operation) or program.num_ranks == 1


def insert_communication(program: Program) -> Program:
    """Add the sends and receives to a program that only computes and updates.

    Raises:
        ScheduleError: the computations wait for each other in a circle, so there is no order to derive them from.
    """
    table = program.table
    waits = waits_of(table)
    order = linearize(table, waits)
    if isinstance(order, Stuck):
        raise ScheduleError(_describe(table, order), "circular wait")
    starts, _ = time_rows(table, waits, order, Costs())
    moment = [(0.0, 0)] * len(table)
    for turn, row in enumerate(order):
        moment[row] = (starts[row], turn)
    before: list[list[tuple[tuple[float, int], Instruction]]] = [[] for _ in range(len(table))]
    after: list[list[Instruction]] = [[] for _ in range(len(table))]
    for producer, send, receiver, receive in _messages(table):
        after[producer].append(send)
        first, end = table.first_row[receiver], table.first_row[receiver + 1]
        running = bisect_right(moment, moment[producer], first, end) - 1
        before[_whole(table, max(running, first))].append((moment[producer], receive))
    streams = []
    for rank, stream in enumerate(program.streams):
        streams.append(_weave(table, rank, stream, before, after))
    return replace(program, streams=tuple(streams))


def _messages(table: Table) -> list[tuple[int, Instruction, int, Instruction]]:
    """Everything that crosses ranks: the row that makes it, its SEND, the rank that needs it, and the RECV there."""
    width, routes = table.num_microbatches, table.placement.routes
    route_of = [routes[table.placement.route_of(microbatch)] for microbatch in range(width)]
    messages: list[tuple[int, Instruction, int, Instruction]] = []
    for stage in range(table.num_stages - 1):
        for microbatch, route in enumerate(route_of):
            if route[stage] == route[stage + 1]:
                continue
            key = stage * width + microbatch
            if table.forward[key] >= 0:
                send, receive = SendActivation(stage, microbatch), ReceiveActivation(stage + 1, microbatch)
                messages.append((table.forward[key], send, route[stage + 1], receive))
            if table.input_gradient[key + width] >= 0:
                back, receive_back = SendGradient(stage + 1, microbatch), ReceiveGradient(stage, microbatch)
                messages.append((table.input_gradient[key + width], back, route[stage], receive_back))
    return messages


def _whole(table: Table, row: int) -> int:
    """The first row of the instruction that a row belongs to: nothing can be put inside a fused pair."""
    return row - 1 if row - 1 in table.fused else row


def _weave(
    table: Table,
    rank: int,
    stream: Sequence[Instruction],
    before: Sequence[list[tuple[tuple[float, int], Instruction]]],
    after: Sequence[list[Instruction]],
) -> tuple[Instruction, ...]:
    """One rank's stream with its receives before and its sends after the computations they belong to."""
    woven: list[Instruction] = []
    row = table.first_row[rank]
    for instruction in stream:
        rows = (row, row + 1) if row in table.fused else (row,)
        if before[row]:
            woven += [receive for _, receive in sorted(before[row], key=_moment)]
        woven.append(instruction)
        for part in rows:
            woven += after[part]
        row += len(rows)
    return tuple(woven)


def _moment(entry: tuple[tuple[float, int], Instruction]) -> tuple[float, int]:
    return entry[0]


def _describe(table: Table, stuck: Stuck) -> str:
    rows = ", ".join(f"rank {rank} at instruction {table.position[row]}" for rank, row in stuck.blocked.items())
    return f"the orders of the ranks wait for each other: {rows}; a forward needs the stage before it, a backward the one after it"
