"""Trace: the measured timeline of a run, of the same kind as the simulated one."""

import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from stagewright.engine.transport.contract import Transport
from stagewright.schedules import Costs, Program, Timeline
from stagewright.schedules.instructions import Overlap

# the clock, and the lengths of what follows: the machine's name in bytes, the times in doubles
_HEAD: Final = struct.Struct("<dII")


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank has measured.

    Args:
        machine: where. Processes of one machine share a clock.
        clock: what that showed at a moment which was the same on all ranks, but for the time of a message.
        times: start and end of each instruction, one after the other, by that clock.
    """

    machine: str
    clock: float
    times: tuple[float, ...]

    def to_bytes(self) -> bytes:
        """For the other ranks."""
        machine = self.machine.encode()
        return (
            _HEAD.pack(self.clock, len(machine), len(self.times))
            + machine
            + struct.pack(f"<{len(self.times)}d", *self.times)
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Record":
        """The reverse of ``to_bytes``."""
        clock, length, count = _HEAD.unpack_from(data)
        start = _HEAD.size + length
        machine = data[_HEAD.size : start].decode()
        return cls(machine, clock, struct.unpack_from(f"<{count}d", data, start))

    def ahead_of(self, other: "Record") -> float:
        """By how much this rank's clock is ahead of another's."""
        return 0.0 if self.machine == other.machine else self.clock - other.clock


def gather_timeline(program: Program, times: Sequence[tuple[float, float]], transport: Transport) -> Timeline:
    """Bring every rank's (start, end) of each instruction together, in seconds; all ranks call this alike."""
    transport.gather(b"")  # all ranks get past this at one moment
    record = Record(platform.node(), perf_counter(), tuple(time for pair in times for time in pair))
    return timeline_of(program, [Record.from_bytes(data) for data in transport.gather(record.to_bytes())])


def timeline_of(program: Program, records: Sequence[Record]) -> Timeline:
    """The timeline that all ranks have measured together; it begins at 0, with the first instruction of any rank.

    Times of ranks on one machine are exact. Those of several machines are put right by what their clocks showed at one
    moment, so they are off by up to the time of a message.
    """
    starts: list[float] = []
    ends: list[float] = []
    for stream, record in zip(program.streams, records):
        ahead = record.ahead_of(records[0])
        for index, instruction in enumerate(stream):
            for _ in range(2 if isinstance(instruction, Overlap) else 1):
                starts.append(record.times[2 * index] - ahead)
                ends.append(record.times[2 * index + 1] - ahead)
    first = min(starts)
    return Timeline(program, Costs(), tuple(time - first for time in starts), tuple(time - first for time in ends))
