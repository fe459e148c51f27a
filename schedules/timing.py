"""Timing: the clock of the simulation, one pass over the rows of a program in a possible order."""

from collections.abc import Sequence

from stagewright.schedules.costs import Costs
from stagewright.schedules.linearize import Waits
from stagewright.schedules.table import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    STEP,
    WEIGHT_GRADIENT,
    Table,
)


def time_rows(table: Table, waits: Waits, order: Sequence[int], costs: Costs) -> tuple[list[float], list[float]]:
    """Start and end of every row; a send's end is the arrival of its message at the other rank."""
    stage_costs = costs.of_stages(table.num_stages)
    durations = {
        FORWARD: stage_costs.forward,
        INPUT_GRADIENT: stage_costs.input_gradient,
        WEIGHT_GRADIENT: stage_costs.weight_gradient,
        BACKWARD: stage_costs.backward,
        STEP: stage_costs.step,
    }
    send = costs.send
    starts, ends = [0.0] * len(table), [0.0] * len(table)
    clock = [0.0] * table.num_ranks
    rank_of, operation_of, stage_of = table.rank, table.operation, table.stage
    first, more, fused = waits.first, waits.more, table.fused
    for row in order:
        rank, operation, stage = rank_of[row], operation_of[row], stage_of[row]
        start = clock[rank]
        if operation == SEND_ACTIVATION or operation == SEND_GRADIENT:
            starts[row], ends[row] = start, start + send
            continue
        awaited = first[row]
        if awaited >= 0:
            start = max(
                start,
                ends[awaited] if rank_of[awaited] == rank or _is_send(operation_of[awaited]) else ends[awaited] + send,
            )
        if row in more:
            start = max(start, *(ends[other] for other in more[row]), start)
        end = start + durations[operation][stage] if operation in durations else start
        if row in fused and stage_costs.overlapped is not None:
            end = start + stage_costs.overlapped[stage]
        elif row - 1 in fused:
            start, end = starts[row - 1], ends[row - 1] if stage_costs.overlapped is not None else end
            starts[row - 1], ends[row - 1] = start, end
        starts[row], ends[row] = start, end
        clock[rank] = end
    return starts, ends


def _is_send(operation: int) -> bool:
    return operation in (SEND_ACTIVATION, SEND_GRADIENT)
