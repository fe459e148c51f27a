"""Timeline: when everything happened or would happen, and the ratios that people compare schedules by."""

from dataclasses import dataclass
from functools import cached_property

from stagewright.schedules.causes import Causes
from stagewright.schedules.costs import Costs
from stagewright.schedules.instructions import Instruction
from stagewright.schedules.linearize import waits_of
from stagewright.schedules.memory import MemoryCurve, memory_curve, peak_stashes
from stagewright.schedules.program import Program
from stagewright.schedules.steady import batches_overlap, overlapping_period, repeated_period
from stagewright.schedules.table import BACKWARD, RECEIVE_ACTIVATION, RECEIVE_GRADIENT, STEP
from stagewright.schedules.timing import measured_costs


@dataclass(frozen=True, slots=True)
class Event:
    """One instruction with its start and end, and what it waited for.

    A send starts when its message leaves and ends when it arrives; a receive stands where it is posted.

    Args:
        instruction: what was done.
        start, end: when.
        rank: by whom.
        waited: how long its rank (or the message, for its channel) stood still before it.
        waited_for: the instruction whose end let it start; None where it could start all along.
    """

    instruction: Instruction
    start: float
    end: float
    rank: int
    waited: float = 0.0
    waited_for: Instruction | None = None


@dataclass(frozen=True)
class CriticalPath:
    """The chain of instructions, each waiting for the one before, that makes a step as long as it is.

    Args:
        events: from the first start to the last end.
        computing: the time on the chain in which its ranks compute or update.
        communicating: the time on the chain in which a message is under way or queued, or gradients are reduced.
        idle: the time on the chain that nothing explains; only measured timelines have it.
    """

    events: tuple[Event, ...]
    computing: float
    communicating: float
    idle: float


@dataclass(frozen=True)
class Timeline:
    """The times of a program, simulated or measured.

    A schedule's bubble depends on where one measures. The *makespan* is a step with an optimizer barrier: it ends when
    the slowest rank does. The *span* is the busiest rank's own time, from its first computation to its last, which
    the zero-bubble papers print. The *steady period* is what a batch takes when batches follow each other and
    ranks wait for data alone.

    Args:
        program: what ran.
        costs: the durations that it was simulated with; of a measured timeline, only the bytes are used.
        starts, ends: one entry a row of ``program.table``, in any one unit; both rows of a fused pair have the pair's.
    """

    program: Program
    costs: Costs
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @cached_property
    def events(self) -> tuple[tuple[Event, ...], ...]:
        """``events[rank]``: that rank's instructions in order, each with its start and end."""
        table = self.program.table
        events: list[tuple[Event, ...]] = []
        for first, end in zip(table.first_row, table.first_row[1:]):
            rows = [row for row in range(first, end) if row - 1 not in table.fused]
            events.append(tuple(map(self._event, rows)))
        return tuple(events)

    def _event(self, row: int) -> Event:
        """A row's event; the second row of a fused pair gives that of the pair."""
        table, rank = self.program.table, self.program.table.rank[row]
        previous, cause = self._causes.previous(row), self._causes.of(row)
        free = self.ends[previous] if previous >= 0 else self._start
        return Event(
            self._instruction(row),
            self.starts[row],
            self.ends[row],
            rank,
            max(self.starts[row] - free, 0.0) if table.operation[row] not in _RECEIVES else 0.0,
            None if cause == previous else self._instruction(cause),
        )

    def _instruction(self, row: int) -> Instruction:
        table = self.program.table
        return self.program.streams[table.rank[row]][table.position[row]]

    @cached_property
    def _causes(self) -> Causes:
        table = self.program.table
        return Causes(table, waits_of(table), self.starts, self.ends)

    @cached_property
    def _spans(self) -> list[tuple[float, float]]:
        """First start and last end of each rank's computations."""
        table = self.program.table
        spans = []
        for first, end in zip(table.first_row, table.first_row[1:]):
            rows = [
                row
                for row in range(first, end)
                if table.operation[row] <= BACKWARD and self.ends[row] > self.starts[row]
            ]
            if rows:
                spans.append((self.starts[rows[0]], self.ends[rows[-1]]))
        return spans

    @property
    def _start(self) -> float:
        return min((start for start, _ in self._spans), default=0.0)

    @cached_property
    def _busy(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Time that each rank computes, and that it updates."""
        table = self.program.table
        computing, updating = [0.0] * table.num_ranks, [0.0] * table.num_ranks
        for row, operation in enumerate(table.operation):
            if operation <= BACKWARD and row - 1 not in table.fused:
                computing[table.rank[row]] += self.ends[row] - self.starts[row]
        for row in table.others:
            if table.operation[row] == STEP:
                updating[table.rank[row]] += self.ends[row] - self.starts[row]
        return tuple(computing), tuple(updating)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank computes or updates."""
        return tuple(computing + updating for computing, updating in zip(*self._busy))

    @cached_property
    def makespan(self) -> float:
        """From the first start on any rank to the last end on any, updates and reductions included."""
        table = self.program.table
        ends = [end for _, end in self._spans]
        ends += [self.ends[row] for row in table.others]
        return max(ends, default=0.0) - self._start if self._spans else 0.0

    @property
    def ideal(self) -> float:
        """The makespan without any idling: what the busiest rank computes and updates."""
        return max(self.busy)

    @property
    def bubble_fraction(self) -> float:
        """idle / (P x makespan): the share of all rank time that is spent waiting."""
        return _share(len(self.busy) * self.makespan - sum(self.busy), len(self.busy) * self.makespan)

    @property
    def bubble_overhead(self) -> float:
        """(makespan - ideal) / ideal: how much longer than without waiting."""
        return _share(self.makespan - self.ideal, self.ideal)

    @property
    def span(self) -> float:
        """The longest any rank takes from its first computation to its last: what counts without optimizer barrier."""
        return max((end - start for start, end in self._spans), default=0.0)

    @property
    def span_bubble(self) -> float:
        """(span - ideal) / span, the rate that the zero-bubble papers print; updates count in neither."""
        return _share(self.span - max(self._busy[0]), self.span)

    @cached_property
    def steady_period(self) -> float:
        """The time per batch when batches follow each other, updates included, and ranks wait for data alone.

        A program that flushes is repeated: each rank begins it anew as soon as it is through with it, until every
        repetition takes as long as the one before. Of a program whose batches overlap it is the slowest rank's time
        from the end of one batch to the end of the next, in its middle.

        Raises:
            ScheduleError: an asynchronous program has fewer than three batches.
        """
        if batches_overlap(self.program):
            return overlapping_period(self.program, self.ends)
        return repeated_period(self.program, measured_costs(self.program.table, self.costs, self.starts, self.ends))

    @property
    def steady_bubble(self) -> float:
        """(period - ideal) / period, with the steady period and the ideal time of one batch."""
        return _share(self.steady_period - self.ideal / self.program.num_batches, self.steady_period)

    @cached_property
    def peak_stash(self) -> tuple[int, ...]:
        """The most stash entries (one stage, one microbatch; freed at W or B) that each rank ever holds."""
        return peak_stashes(self.program.table)

    @cached_property
    def memory(self) -> tuple[MemoryCurve, ...]:
        """``memory[rank]``: the bytes that a rank stashes in the course of time, as the costs have them."""
        table, costs = self.program.table, self.costs.of_stages(self.program.num_stages)
        return tuple(memory_curve(table, rank, self.starts, self.ends, costs) for rank in range(table.num_ranks))

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most bytes that each rank ever stashes."""
        return tuple(curve.peak for curve in self.memory)

    @cached_property
    def critical_rows(self) -> tuple[int, ...]:
        """The rows of the critical path in ``program.table``."""
        return tuple(self._causes.chain())

    @cached_property
    def critical_path(self) -> CriticalPath:
        """The chain of instructions that one must shorten to shorten the makespan."""
        table, rows = self.program.table, self.critical_rows
        computing = communicating = 0.0
        for row, following in zip(rows, [*rows[1:], -1]):
            end = self.ends[row] if following < 0 else min(self.ends[row], self.starts[following])
            if table.operation[row] <= BACKWARD or table.operation[row] == STEP:
                computing += end - self.starts[row]
            else:
                communicating += end - self.starts[row]
        events = tuple(map(self._event, rows))
        return CriticalPath(events, computing, communicating, max(self.makespan - computing - communicating, 0.0))

    def _repr_svg_(self) -> str:
        """The picture that a notebook shows."""
        from stagewright.schedules.drawing.svg import svg_text  # late, because what draws timelines imports this module

        return svg_text(self)


_RECEIVES = frozenset((RECEIVE_ACTIVATION, RECEIVE_GRADIENT))


def _share(part: float, whole: float) -> float:
    """A ratio, of nothing where there is nothing."""
    return part / whole if whole else 0.0
