"""Every send has exactly one receive, in the same order on each channel (source, destination, direction)."""

from collections.abc import Sequence

from stagewright.schedules.program import Program
from stagewright.schedules.proof.report import at_row, refusal
from stagewright.schedules.table import BACKWARD, RECEIVE_ACTIVATION, RECEIVE_GRADIENT


def check_channels(program: Program) -> None:
    """Refuse sends without receives, receives without sends, and channels that are read out of order."""
    table = program.table
    for row in table.repeated:
        if table.operation[row] > BACKWARD:
            raise refusal(program, "duplicate message", f"{at_row(program, row)} stands there a second time", row)
    width = table.num_microbatches
    _pair(program, table.send_activation, table.receive_activation, width)
    _pair(program, table.send_gradient, table.receive_gradient, -width)
    _check_order(program)


def _pair(program: Program, sends: Sequence[int], receives: Sequence[int], offset: int) -> None:
    """Find for every send its receive, ``offset`` further on in the index, and for every receive its send."""
    table = program.table
    for key, send in enumerate(sends):
        if send < 0:
            continue
        receive = receives[key + offset] if 0 <= key + offset < len(receives) else -1
        if receive < 0:
            raise refusal(program, "send without receive", f"nobody receives {at_row(program, send)}", send)
        if table.rank[receive] == table.rank[send]:
            message = f"{at_row(program, send)} stays on its rank: stages on one rank hand over directly"
            raise refusal(program, "placement", message, send, receive)
    for key, receive in enumerate(receives):
        if receive >= 0 and not (0 <= key - offset < len(sends) and sends[key - offset] >= 0):
            message = f"nobody sends what {at_row(program, receive)} waits for"
            raise refusal(program, "receive without send", message, receive)


def _check_order(program: Program) -> None:
    """Each channel's receives, in their order, belong to sends in their order."""
    table = program.table
    width, rank = table.num_microbatches, table.rank
    latest: dict[tuple[int, int, int], tuple[int, int]] = {}
    for row, operation in enumerate(table.operation):
        if operation == RECEIVE_ACTIVATION:
            send = table.send_activation[(table.stage[row] - 1) * width + table.microbatch[row]]
        elif operation == RECEIVE_GRADIENT:
            send = table.send_gradient[(table.stage[row] + 1) * width + table.microbatch[row]]
        else:
            continue
        channel = (rank[send], rank[row], operation)
        if channel in latest and latest[channel][0] > send:
            send_before, row_before = latest[channel]
            message = (
                f"a channel is read in the order in which it is written: {at_row(program, row_before)} comes before "
                f"{at_row(program, row)}, but {at_row(program, send)} before {at_row(program, send_before)}"
            )
            raise refusal(program, "channel order", message, row, row_before, send, send_before)
        latest[channel] = (send, row)
