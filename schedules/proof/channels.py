"""Every send has exactly one receive, in the same order on each channel (source, destination, direction)."""

from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.program import Program
from stagewright.schedules.proof.report import at_row
from stagewright.schedules.table import RECEIVE_ACTIVATION, RECEIVE_GRADIENT, SEND_ACTIVATION, SEND_GRADIENT


def check_channels(program: Program) -> None:
    """Refuse sends without receives, receives without sends, and channels that are read out of order."""
    table = program.table
    width = table.num_microbatches
    _pair(program, table.send_activation, table.receive_activation, width)
    _pair(program, table.send_gradient, table.receive_gradient, -width)
    sent: dict[tuple[int, int, bool], list[int]] = {}
    received: dict[tuple[int, int, bool], list[int]] = {}
    for row, (rank, operation) in enumerate(zip(table.rank, table.operation)):
        if not SEND_ACTIVATION <= operation <= RECEIVE_GRADIENT:
            continue
        key = table.stage[row] * width + table.microbatch[row]
        if operation == SEND_ACTIVATION:
            sent.setdefault((rank, table.rank[table.receive_activation[key + width]], True), []).append(row)
        elif operation == SEND_GRADIENT:
            sent.setdefault((rank, table.rank[table.receive_gradient[key - width]], False), []).append(row)
        elif operation == RECEIVE_ACTIVATION:
            received.setdefault((table.rank[table.send_activation[key - width]], rank, True), []).append(row)
        else:
            received.setdefault((table.rank[table.send_gradient[key + width]], rank, False), []).append(row)
    for channel, sends in sent.items():
        for send, receive in zip(sends, received[channel]):
            step = 1 if channel[2] else -1
            if (table.stage[send] + step, table.microbatch[send]) != (table.stage[receive], table.microbatch[receive]):
                raise ScheduleError(
                    f"{at_row(program, receive)} would get what {at_row(program, send)} sent", "channel order"
                )


def _pair(program: Program, sends: list[int], receives: list[int], offset: int) -> None:
    table = program.table
    for key, send in enumerate(sends):
        if send < 0:
            continue
        receive = receives[key + offset] if 0 <= key + offset < len(receives) else -1
        if receive < 0:
            raise ScheduleError(f"nobody receives {at_row(program, send)}", "send without receive")
        if table.rank[receive] == table.rank[send]:
            raise ScheduleError(
                f"{at_row(program, send)} stays on its rank: stages on one rank hand over directly", "placement"
            )
    for key, receive in enumerate(receives):
        if receive >= 0 and not (0 <= key - offset < len(sends) and sends[key - offset] >= 0):
            raise ScheduleError(f"nobody sends what {at_row(program, receive)} waits for", "receive without send")
