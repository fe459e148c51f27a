"""Explanation: why a measured step took as long as it did."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from statistics import fmean
from typing import Final

from stagewright.schedules.costs import Costs
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.fitting import Observed, fit_costs, fit_hops
from stagewright.schedules.linearize import Stuck, linearize, waits_of
from stagewright.schedules.simulation import simulate
from stagewright.schedules.steady import batches_overlap
from stagewright.schedules.table import (
    BACKWARD,
    OVERLAP,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    REDUCE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    STEP,
)
from stagewright.schedules.timeline import Event, Timeline
from stagewright.schedules.timing import ASYNCHRONOUS, RowCosts, time_rows

_MESSAGES: Final = (SEND_ACTIVATION, RECEIVE_ACTIVATION, SEND_GRADIENT, RECEIVE_GRADIENT)


@dataclass(frozen=True)
class Split:
    """Where the time of one rank's step went; ``computing`` and the four parts of its bubble add up to ``step``.

    Each part is what the step grows by when a further thing is taken into account, so a part can be below zero: a rank
    that computes more than the others waits less for it.

    Args:
        rank: whose.
        step: from the first start on any rank to the last end on any; where batches follow each other without a flush,
            from this rank's own first start to its last end.
        computing: for which the rank computes or updates.
        inherent: the bubble of the schedule itself: what the rank would wait if every instruction took the mean of its
            kind over all ranks and messages took no time.
        imbalance: what it waits beyond that because instructions take different times, on different stages or from one
            microbatch to the next.
        communication: what the step grows by as ranks are busy with sending, posting and taking messages, and as each
            message takes the least time that one took on its hop.
        overhead: the rest of the step: what no instruction accounts for. The engine between two instructions, messages
            later than usual, a processor that was taken away.
    """

    rank: int
    step: float
    computing: float
    inherent: float
    imbalance: float
    communication: float
    overhead: float

    @property
    def bubble(self) -> float:
        """The four parts together: for so long the rank does not compute."""
        return self.inherent + self.imbalance + self.communication + self.overhead


@dataclass(frozen=True)
class Contribution:
    """What one instruction adds to the step.

    Args:
        event: the instruction, when it ran, and where.
        longer: by how much it took longer than the mean of its kind; all that it took, where it does not compute.
        late: for how long nothing on its rank or any other kept it from starting, but for a message on its way.
    """

    event: Event
    longer: float
    late: float

    @property
    def cost(self) -> float:
        """Both together."""
        return self.longer + self.late


@dataclass(frozen=True)
class Explanation:
    """A measured timeline held against what was to be expected of it.

    Args:
        measured: the timeline.
        costs: with which it was predicted.
    """

    measured: Timeline
    costs: Costs

    @cached_property
    def predicted(self) -> Timeline:
        """The same program, simulated."""
        return simulate(self.measured.program, self.costs)

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """Where each rank's time went."""
        model = _Model(self.measured)
        computing = self.measured.busy
        measured = model.steps(self.measured.starts, self.measured.ends)
        even, uneven, connected = (model.simulated(costs) for costs in (model.even, model.uneven, model.connected))
        evenly = model.busy(model.even)
        splits = []
        for rank, step in enumerate(measured):
            inherent = even[rank] - evenly[rank]
            imbalance = uneven[rank] - computing[rank] - inherent
            communication = connected[rank] - uneven[rank]
            overhead = step - connected[rank]
            splits.append(Split(rank, step, computing[rank], inherent, imbalance, communication, overhead))
        return tuple(splits)

    @cached_property
    def contributions(self) -> tuple[Contribution, ...]:
        """The chain of instructions that makes the step as long as it is, the dearest first.

        Each waited for the one before it in time. What they cost, and the mean of its kind for each that computes, add
        up to the time from the first start on the chain to the end.
        """
        return tuple(sorted(_chain(self.measured), key=lambda contribution: -contribution.cost))


def explain(measured: Timeline, costs: Costs | None = None) -> Explanation:
    """Explain a measured step.

    Args:
        measured: as ``Pipeline.trace`` gives it, of a whole step or of a window.
        costs: with which it was predicted; fitted to the step itself where left out.

    Raises:
        ScheduleError: the timeline's program can never have run, or computes nothing.
    """
    table = measured.program.table
    if not any(operation <= BACKWARD for operation in table.operation):
        raise ScheduleError("a step without any computation has nothing to explain", "missing compute")
    if isinstance(linearize(table, waits_of(table)), Stuck):
        raise ScheduleError(
            "the program of this timeline can never have run: its ranks wait in a circle", "circular wait"
        )
    return Explanation(measured, fit_costs([measured]) if costs is None else costs)


class _Model:
    """The measured step with one thing after the other taken into account, each as what its rows take."""

    def __init__(self, timeline: Timeline) -> None:
        self._table = timeline.program.table
        self._taken = [end - start for start, end in zip(timeline.starts, timeline.ends)]
        self._waits = waits_of(self._table)
        self._order = linearize(self._table, self._waits)
        self._observed = Observed(timeline)
        self._overlapping = batches_overlap(timeline.program)

    def simulated(self, costs: RowCosts) -> tuple[float, ...]:
        """How long each rank's step is then."""
        assert isinstance(self._order, list), "explain has seen that it is not stuck"
        return self.steps(*time_rows(self._table, self._waits, self._order, costs))

    def steps(self, starts: Sequence[float], ends: Sequence[float]) -> tuple[float, ...]:
        """How long the step is for each rank."""
        table = self._table
        spans: list[tuple[float, float]] = []
        for first, last in zip(table.first_row, table.first_row[1:]):
            begun = [starts[row] for row in range(first, last) if table.operation[row] <= BACKWARD]
            done = [ends[row] for row in range(first, last) if table.operation[row] not in _MESSAGES]
            spans.append((min(begun), max(done)) if begun else (inf, max(done, default=-inf)))
        if self._overlapping:
            return tuple(max(end - start, 0.0) for start, end in spans)
        return (max(end for _, end in spans) - min(start for start, _ in spans),) * len(spans)

    def busy(self, costs: RowCosts) -> list[float]:
        """For how long each rank computes and updates."""
        busy = [0.0] * self._table.num_ranks
        for row in self._occupying:
            busy[self._table.rank[row]] += costs.durations[row]
        return busy

    @cached_property
    def even(self) -> RowCosts:
        """Every instruction takes the mean of its kind; nothing else takes time."""
        return RowCosts(self._with([self.mean_of(row) for row in self._occupying]))

    @cached_property
    def uneven(self) -> RowCosts:
        """Every instruction takes what it has taken; nothing else takes time."""
        return RowCosts(self._with([self._taken[row] for row in self._occupying]))

    @cached_property
    def connected(self) -> RowCosts:
        """Messages take time as well: their ranks are busy with them, and then they are on their way."""
        table, hops = self._table, fit_hops([self._observed], min)
        durations = list(self.uneven.durations)
        latency = hops.of_stages(table.num_stages)
        reductions = self._observed.reductions
        for row, (operation, stage) in enumerate(zip(table.operation, table.stage)):
            if operation in ASYNCHRONOUS:
                holder = self._holder(row)
                if holder >= 0:
                    durations[holder] += self._taken[row]
                if operation == REDUCE_GRADIENT:
                    durations[row] = min(reductions.get(stage, [0.0]))
                else:
                    durations[row] = latency[stage - (operation == SEND_GRADIENT)] if stage >= 0 else max(latency)
            elif not _occupies(operation):
                durations[row] += self._taken[row]
        for row, _ in self._observed.received:
            durations[row] += hops.takes.get(self._observed.kind_of(row), 0.0)
        return RowCosts(durations)

    def mean_of(self, row: int) -> float:
        """What instructions of a row's kind take on the average of all stages."""
        return self._means[self._operation(row)]

    @cached_property
    def _means(self) -> dict[int, float]:
        of_kind: dict[int, list[float]] = defaultdict(list)
        for row in self._occupying:
            of_kind[self._operation(row)].append(self._taken[row])
        return {operation: fmean(values) for operation, values in of_kind.items()}

    @cached_property
    def _occupying(self) -> list[int]:
        """The rows that keep a rank computing; a fused pair by its first."""
        table = self._table
        return [row for row, op in enumerate(table.operation) if _occupies(op) and row - 1 not in table.fused]

    def _operation(self, row: int) -> int:
        return OVERLAP if row in self._table.fused else self._table.operation[row]

    def _with(self, durations: Sequence[float]) -> list[float]:
        """These for the rows that compute, and nothing for the others."""
        rows = [0.0] * len(self._table)
        for row, duration in zip(self._occupying, durations):
            rows[row] = duration
        return rows

    def _holder(self, row: int) -> int:
        """What stands before a row and keeps its rank, or -1: what its rank does for a message is added to that."""
        table = self._table
        first = table.first_row[table.rank[row]]
        while row >= first and table.operation[row] in ASYNCHRONOUS:
            row -= 1
        return -1 if row < first else row - (row - 1 in table.fused)


def _occupies(operation: int) -> bool:
    return operation <= BACKWARD or operation == STEP


def _chain(timeline: Timeline) -> list[Contribution]:
    """What each instruction of the critical path contributes, in order of time."""
    model = _Model(timeline)
    contributions = []
    ready = inf
    path = timeline.critical_path.events
    for event, row, following in zip(path, timeline.critical_rows, [*path[1:], None]):
        end = event.end if following is None else min(event.end, following.start)
        usual = model.mean_of(row) if _occupies(timeline.program.table.operation[row]) else 0.0
        contributions.append(Contribution(event, end - event.start - usual, max(event.start - ready, 0.0)))
        ready = event.end
    return contributions
