"""Trace: the measured timeline of a run, of the same kind as the simulated one."""

import struct
from collections.abc import Sequence

from stagewright.engine.transport.contract import Transport
from stagewright.schedules import Costs, Program, Timeline
from stagewright.schedules.instructions import Overlap


def gather_timeline(program: Program, times: Sequence[tuple[float, float]], transport: Transport) -> Timeline:
    """Bring every rank's (start, end) of each instruction together; all ranks call this alike.

    Times are seconds since the first start on any rank. Clocks are those of one machine, which all its processes share.
    """
    numbers = [time for pair in times for time in pair]
    starts: list[float] = []
    ends: list[float] = []
    for stream, data in zip(program.streams, transport.gather(struct.pack(f"<{len(numbers)}d", *numbers))):
        measured = struct.unpack(f"<{len(data) // 8}d", data)
        for index, instruction in enumerate(stream):
            for _ in range(2 if isinstance(instruction, Overlap) else 1):
                starts.append(measured[2 * index])
                ends.append(measured[2 * index + 1])
    first = min(starts)
    return Timeline(program, Costs(), tuple(time - first for time in starts), tuple(time - first for time in ends))
