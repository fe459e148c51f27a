"""The communication pass: from what each rank computes to what it sends and receives.

A SEND stands right after its producer. A RECV is posted before the instruction that its rank computes
while the producer starts, as found by simulating the computations alone. All ranks can then run in the
order of that simulation with every receive posted before its send begins, so the program stands even
where sends wait for their receiver; and each channel's receives stand in the order of production.
"""

from collections.abc import Mapping, Sequence, Set
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
    starts, _ = time_rows(table, waits, order, row_costs(table, Costs()))
    in_time = sorted(order, key=starts.__getitem__)  # stable: what starts together stays in a possible order
    before, after = _messages(table, in_time)
    streams = tuple(
        _weave(stream, first, table.fused, before, after) for stream, first in zip(program.streams, table.first_row)
    )
    return replace(program, streams=streams)


def _messages(table: Table, in_time: Sequence[int]) -> tuple[dict[int, list[Instruction]], dict[int, Instruction]]:
    """The RECVs to put before, and the SEND to put after, each row; the rows come in the order of their starts."""
    width, last = table.num_microbatches, table.num_stages - 1
    routes = [table.placement.routes[table.placement.route_of(microbatch)] for microbatch in range(width)]
    before: dict[int, list[Instruction]] = {}
    after: dict[int, Instruction] = {}
    running = table.first_row[:-1]
    for row in in_time:
        # Nothing can be put inside a fused pair; and a reduction may start after what its rank issues next.
        running[table.rank[row]] = max(running[table.rank[row]], row - 1 if row - 1 in table.fused else row)
        operation, stage, microbatch = table.operation[row], table.stage[row], table.microbatch[row]
        if operation == FORWARD and stage < last and microbatch < width:
            source, destination = routes[microbatch][stage : stage + 2]
            if source != destination and table.forward[stage * width + microbatch] == row:
                after[row] = SendActivation(stage, microbatch)
                before.setdefault(running[destination], []).append(ReceiveActivation(stage + 1, microbatch))
        elif operation in (INPUT_GRADIENT, BACKWARD) and 0 < stage <= last and microbatch < width:
            destination, source = routes[microbatch][stage - 1 : stage + 1]
            if source != destination and table.input_gradient[stage * width + microbatch] == row:
                after[row] = SendGradient(stage, microbatch)
                before.setdefault(running[destination], []).append(ReceiveGradient(stage - 1, microbatch))
    return before, after


def _weave(
    stream: Sequence[Instruction],
    row: int,
    fused: Set[int],
    before: Mapping[int, Sequence[Instruction]],
    after: Mapping[int, Instruction],
) -> tuple[Instruction, ...]:
    """One rank's stream, from its first row on, with its receives before and its sends after the computations."""
    woven: list[Instruction] = []
    for instruction in stream:
        if row in before:
            woven += before[row]
        woven.append(instruction)
        end = row + 2 if row in fused else row + 1
        for part in range(row, end):
            if part in after:
                woven.append(after[part])
        row = end
    return tuple(woven)


def _describe(table: Table, stuck: Stuck) -> str:
    rows = ", ".join(f"rank {rank} at instruction {table.position[row]}" for rank, row in stuck.blocked.items())
    return (
        f"the orders of the ranks wait for each other: {rows}; "
        "a forward needs the stage before it, a backward the one after it"
    )
