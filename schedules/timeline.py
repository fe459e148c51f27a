"""Timeline: when everything happened or would happen, and the ratios that people compare schedules by."""

from dataclasses import dataclass
from functools import cached_property

from stagewright.schedules.costs import Costs
from stagewright.schedules.instructions import Instruction
from stagewright.schedules.program import Program
from stagewright.schedules.table import BACKWARD, FORWARD, WEIGHT_GRADIENT


@dataclass(frozen=True, slots=True)
class Event:
    """One instruction with its start and end."""

    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The times of a program, simulated or measured.

    Args:
        program: what ran.
        costs: the durations that it was simulated with.
        starts, ends: one entry a row of ``program.table``.
    """

    program: Program
    costs: Costs
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @cached_property
    def events(self) -> tuple[tuple[Event, ...], ...]:
        """``events[rank]``: that rank's instructions in order, each with its start and end."""
        events = []
        row = 0
        for stream in self.program.streams:
            of_rank = []
            for instruction in stream:
                of_rank.append(Event(instruction, self.starts[row], self.ends[row]))
                row += 2 if row in self.program.table.fused else 1
            events.append(tuple(of_rank))
        return tuple(events)

    @cached_property
    def _spans(self) -> list[tuple[float, float]]:
        """First start and last end of each rank's computations and steps."""
        table = self.program.table
        spans = []
        for rank in range(table.num_ranks):
            rows = [
                row
                for row in range(table.first_row[rank], table.first_row[rank + 1])
                if self.ends[row] > self.starts[row] and table.operation[row] <= BACKWARD
            ]
            spans.append((self.starts[rows[0]], max(self.ends[rows[0]], self.ends[rows[-1]])) if rows else (0.0, 0.0))
        return spans

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        table = self.program.table
        busy = [0.0] * table.num_ranks
        for row, operation in enumerate(table.operation):
            if operation <= BACKWARD and row - 1 not in table.fused:
                busy[table.rank[row]] += self.ends[row] - self.starts[row]
        return tuple(busy)

    @cached_property
    def makespan(self) -> float:
        """From the first start on any rank to the last end on any: the step with an optimizer barrier."""
        return max(end for _, end in self._spans) - min(start for start, _ in self._spans)

    @property
    def ideal(self) -> float:
        """The makespan without any idling: the busiest rank's compute time."""
        return max(self.busy)

    @property
    def bubble_fraction(self) -> float:
        """idle / (P x makespan): the share of all rank time that is spent waiting."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)

    @property
    def bubble_overhead(self) -> float:
        """(makespan - ideal) / ideal: how much longer than without waiting."""
        return (self.makespan - self.ideal) / self.ideal

    @property
    def span(self) -> float:
        """The longest any rank takes from its first start to its last end: what counts without an optimizer barrier."""
        return max(end - start for start, end in self._spans)

    @property
    def span_bubble(self) -> float:
        """(span - ideal) / span, the rate that the zero-bubble papers print."""
        return (self.span - self.ideal) / self.span

    @cached_property
    def peak_stash(self) -> tuple[int, ...]:
        """The most stash entries (one stage, one microbatch; freed at W or B) that each rank ever holds."""
        table = self.program.table
        peaks = []
        for rank in range(table.num_ranks):
            live = peak = 0
            for operation in table.operation[table.first_row[rank] : table.first_row[rank + 1]]:
                if operation == FORWARD:
                    live += 1
                    peak = max(peak, live)
                elif operation == WEIGHT_GRADIENT or operation == BACKWARD:
                    live -= 1
            peaks.append(peak)
        return tuple(peaks)
