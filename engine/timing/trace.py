"""Trace: the measured timeline of a run, of the same kind as the simulated one."""

import platform
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from stagewright.engine.run import Run
from stagewright.engine.timing.recorder import Moment, recorder_of
from stagewright.engine.transport.contract import Transport
from stagewright.engine.value import Layout
from stagewright.schedules import Costs, Program, Timeline
from stagewright.schedules.instructions import Overlap

# the clock, and the lengths of what follows: the machine's name in bytes, the times in doubles
_HEAD: Final = struct.Struct("<dII")
# Steps that are kept for a calibration.
NUM_KEPT: Final = 10


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
        """The reverse of ``to_bytes``.

        Raises:
            ValueError: these bytes are no record.
        """
        try:
            clock, length, count = _HEAD.unpack_from(data)
            start = _HEAD.size + length
            machine = data[_HEAD.size : start].decode()
            return cls(machine, clock, struct.unpack_from(f"<{count}d", data, start))
        except struct.error as error:
            raise ValueError(f"{len(data)} bytes are no record of a step: {error}") from error

    def ahead_of(self, other: "Record") -> float:
        """By how much this rank's clock is ahead of another's."""
        return 0.0 if self.machine == other.machine else self.clock - other.clock


@dataclass(frozen=True, slots=True)
class Recorded:
    """One training step as this rank has noted it.

    Args:
        program: what ran.
        times: start and end of each instruction of this rank.
        layouts: of a message, by whether it is an activation and the stage that needs it.
    """

    program: Program
    times: Sequence[tuple[Moment, Moment]]
    layouts: Mapping[tuple[bool, int], Layout]


class History:
    """The last training steps on this rank, without the very first, in which buffers are made, once there are others.

    Args:
        transport: connects the ranks.
        num_kept: so many steps are kept at most.
    """

    def __init__(self, transport: Transport, num_kept: int = NUM_KEPT) -> None:
        self._transport = transport
        self._recorder = recorder_of(transport.device)
        self._kept: deque[Recorded] = deque(maxlen=num_kept)
        self._num_added = 0

    def add(self, program: Program, run: Run) -> None:
        """Keep what was noted of a step, and nothing else of it."""
        if self._num_added == 1:
            self._kept.clear()
        self._kept.append(Recorded(program, run.times, run.layouts))
        self._num_added += 1

    def last(self, num_steps: int) -> list[Recorded]:
        """The newest of what is kept, in order.

        Raises:
            ValueError: there was no training step yet, or none is asked for.
        """
        if num_steps < 1:
            raise ValueError(f"the last steps are one or more: got num_steps={num_steps}")
        if not self._kept:
            raise ValueError("there is nothing to show yet: call train_step first")
        return list(self._kept)[-num_steps:]

    def timelines(self, num_steps: int = 1) -> list[Timeline]:
        """The timelines of the last steps, in seconds; all ranks call this alike."""
        transport = self._transport
        steps = self.last(num_steps)
        flat = [[moment for pair in step.times for moment in pair] for step in steps]
        seconds = [tuple(self._recorder.seconds(moments)) for moments in flat]
        transport.gather(b"")  # all ranks get past this at one moment
        clock = perf_counter()
        timelines = []
        for step, times in zip(steps, seconds):
            record = Record(platform.node(), clock, times)
            records = [Record.from_bytes(data) for data in transport.gather(record.to_bytes())]
            timelines.append(timeline_of(step.program, records))
        return timelines


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
