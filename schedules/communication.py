"""The communication pass: from what each rank computes to what it sends and receives.

A SEND stands right after its producer. A RECV is posted before the instruction that its rank computes
while the producer starts, as found by simulating the computations alone. All ranks can then run in the
order of that simulation with every receive posted before its send begins, so the program stands even
where sends wait for their receiver; and each channel's receives stand in the order of production.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

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
from stagewright.schedules.table import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    Table,
)
from stagewright.schedules.timing import row_costs, time_rows

_OPERATIONS = frozenset((SEND_ACTIVATION, RECEIVE_ACTIVATION, SEND_GRADIENT, RECEIVE_GRADIENT))


@dataclass(frozen=True)
class Messages:
    """Where a program that only computes and updates has to communicate.

    Args:
        table: of the program.
        sent: the rows whose result another rank needs.
        before: those of them whose result is received before a row, in order.
    """

    table: Table
    sent: Set[int]
    before: Mapping[int, Sequence[int]]

    def send(self, row: int) -> Instruction:
        """The SEND of what a row makes."""
        send = SendActivation if self.table.operation[row] == FORWARD else SendGradient
        return send(self.table.stage[row], self.table.microbatch[row])

    def receive(self, row: int) -> Instruction:
        """The RECV of it on the other rank."""
        stage, microbatch = self.table.stage[row], self.table.microbatch[row]
        if self.table.operation[row] == FORWARD:
            return ReceiveActivation(stage + 1, microbatch)
        return ReceiveGradient(stage - 1, microbatch)


def communicates(program: Program) -> bool:
    """Whether a program says what is sent and received, or needs to say nothing since nothing crosses ranks."""
    return not _OPERATIONS.isdisjoint(program.table.operation) or program.num_ranks == 1


def insert_communication(program: Program) -> Program:
    """Add the sends and receives to a program that only computes and updates.

    Raises:
        ScheduleError: the computations wait for each other in a circle, so there is no order to derive them from.
    """
    table, messages = program.table, messages_of(program)
    streams = tuple(
        _weave(stream, first, table.fused, messages) for stream, first in zip(program.streams, table.first_row)
    )
    return replace(program, streams=streams)


def messages_of(program: Program) -> Messages:
    """The sends and receives that a program needs, and where.

    Raises:
        ScheduleError: as above.
    """
    table = program.table
    waits = waits_of(table)
    order = linearize(table, waits)
    if isinstance(order, Stuck):
        raise ScheduleError(_describe(table, order), "circular wait")
    starts, _ = time_rows(table, waits, order, row_costs(table, Costs()))
    # The sort is stable: what starts together stays in a possible order.
    return _messages(table, sorted(order, key=starts.__getitem__))


def _messages(table: Table, in_time: Sequence[int]) -> Messages:
    """The same, for rows in the order of their starts."""
    width, last = table.num_microbatches, table.num_stages - 1
    routes = [table.placement.routes[table.placement.route_of(microbatch)] for microbatch in range(width)]
    sent: set[int] = set()
    before: dict[int, list[int]] = {}
    running = table.first_row[:-1]
    for row in in_time:
        # Nothing can be put inside a fused pair; and a reduction may start after what its rank issues next.
        running[table.rank[row]] = max(running[table.rank[row]], row - 1 if row - 1 in table.fused else row)
        operation, stage, microbatch = table.operation[row], table.stage[row], table.microbatch[row]
        if operation == FORWARD and stage < last and microbatch < width:
            source, destination = routes[microbatch][stage : stage + 2]
            made = table.forward
        elif operation in (INPUT_GRADIENT, BACKWARD) and 0 < stage <= last and microbatch < width:
            destination, source = routes[microbatch][stage - 1 : stage + 1]
            made = table.input_gradient
        else:
            continue
        if source != destination and made[stage * width + microbatch] == row:
            sent.add(row)
            before.setdefault(running[destination], []).append(row)
    return Messages(table, sent, before)


def _weave(stream: Sequence[Instruction], row: int, fused: Set[int], messages: Messages) -> tuple[Instruction, ...]:
    """One rank's stream, from its first row on, with its receives before and its sends after the computations."""
    woven: list[Instruction] = []
    for instruction in stream:
        if row in messages.before:
            woven += map(messages.receive, messages.before[row])
        woven.append(instruction)
        end = row + 2 if row in fused else row + 1
        for part in range(row, end):
            if part in messages.sent:
                woven.append(messages.send(part))
        row = end
    return tuple(woven)


def _describe(table: Table, stuck: Stuck) -> str:
    rows = ", ".join(f"rank {rank} at instruction {table.position[row]}" for rank, row in stuck.blocked.items())
    return (
        f"the orders of the ranks wait for each other: {rows}; "
        "a forward needs the stage before it, a backward the one after it"
    )
