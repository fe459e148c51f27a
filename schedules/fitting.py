"""Fitting: from measured timelines to the costs with which the simulator would predict them.

Who measures sees more than the simulator's costs can say: a rank is busy for a moment with every message that it sends
or posts, and with taking its input out of one. Here that goes into the cost of the computation it belongs to, and what
is left of a message's way is the hop.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from statistics import fmean, median
from typing import Final, TypeAlias, TypeVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.linearize import waits_of
from stagewright.schedules.table import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    OVERLAP,
    REDUCE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    STEP,
    WEIGHT_GRADIENT,
)
from stagewright.schedules.timeline import Timeline

Key = TypeVar("Key")
# What a rank is busy with: the field of Costs, and the stage.
Kind: TypeAlias = tuple[str, int]
Samples: TypeAlias = Mapping[Key, Sequence[float]]

_FIELDS: Final = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_GRADIENT: "input_gradient",
    WEIGHT_GRADIENT: "weight_gradient",
    OVERLAP: "overlapped",
    STEP: "step",
}
_SENDS: Final = (SEND_ACTIVATION, SEND_GRADIENT)


def mean_costs(timelines: Sequence[Timeline]) -> Costs:
    """Average what the computations and updates of some timelines took, stage by stage and kind by kind.

    A kind that some stage never computes on its own, because it is always half of a fused pair there, is concluded from
    its other kinds and the other stages. Messages take no time.
    """
    steps = [_means(Observed(timeline).computing) for timeline in timelines]
    return _costs({kind: fmean(values) for kind, values in _merged(steps).items()}, timelines[0].program.num_stages)


def fit_costs(timelines: Sequence[Timeline]) -> Costs:
    """The costs by which a simulation comes nearest to some timelines of one pipeline, in their unit of time.

    Durations are means over a timeline, and the median of these over the timelines, so that one disturbed step does
    not count. The latency of a hop is the median over messages that were waited for, whatever their size.
    """
    observed = [Observed(timeline) for timeline in timelines]
    num_stages = timelines[0].program.num_stages
    hops = fit_hops(observed)
    busy = {kind: median(values) for kind, values in _merged(_means(one.busy) for one in observed).items()}
    costs = _costs({kind: duration + hops.takes.get(kind, 0.0) for kind, duration in busy.items()}, num_stages)
    reductions = _merged(one.reductions for one in observed)
    return replace(
        costs,
        send=hops.of_stages(num_stages),
        reduce=tuple(median(reductions.get(stage, [0.0])) for stage in range(num_stages)),
    )


@dataclass(frozen=True)
class Hops:
    """What messages take.

    Args:
        latency: by boundary, known by the stage below it: from the end of a SEND until its message lies ready.
        takes: by what needs the message: how long its rank is busy with taking it.
    """

    latency: Mapping[int, float]
    takes: Mapping[Kind, float]

    def of_stages(self, num_stages: int) -> tuple[float, ...]:
        """The latency of every boundary; where nothing was seen, the mean of the others."""
        elsewhere = fmean(self.latency.values()) if self.latency else 0.0
        return tuple(self.latency.get(stage, elsewhere) for stage in range(num_stages))


def fit_hops(observed: Sequence["Observed"], average: Callable[[Sequence[float]], float] = median) -> Hops:
    """Find what the messages of some timelines took, on some kind of average."""
    hops = {boundary: average(values) for boundary, values in _merged(one.hops for one in observed).items()}
    takes = {kind: average(values) for kind, values in _merged(one.takes(hops) for one in observed).items()}
    of_boundary: dict[int, list[float]] = {boundary: [] for boundary in hops}
    for (name, stage), take in takes.items():
        of_boundary[stage - 1 if name in ("forward", "overlapped") else stage].append(take)
    latency = {boundary: max(hop - fmean(of_boundary[boundary] or [0.0]), 0.0) for boundary, hop in hops.items()}
    return Hops(latency, takes)


class Observed:
    """What one measured timeline shows, in lists that are still to be averaged.

    Args:
        timeline: as ``Pipeline.trace`` gives it: a SEND and a RECV stand while their rank is busy with them, a
            computation from the moment at which its input was there.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._table = timeline.program.table
        self._starts, self._ends = timeline.starts, timeline.ends
        self._first, self._more = (waits := waits_of(self._table)).first, waits.more

    @cached_property
    def computing(self) -> Samples[Kind]:
        """The durations of computations and updates."""
        samples: dict[Kind, list[float]] = defaultdict(list)
        for row in self._rows:
            samples[self.kind_of(row)].append(self._ends[row] - self._starts[row])
        return samples

    @cached_property
    def busy(self) -> Samples[Kind]:
        """The same, each with what its rank does for messages before it comes to the next."""
        samples: dict[Kind, list[float]] = defaultdict(list)
        for row in self._rows:
            samples[self.kind_of(row)].append(self._ends[self._last_of(row)] - self._starts[row])
        return samples

    @cached_property
    def hops(self) -> Samples[int]:
        """By boundary, known by the stage below it: from the end of a SEND to the start of what needs its message.

        Of those alone for which a rank stood idle already when the SEND was through: they started on arrival.
        """
        samples: dict[int, list[float]] = defaultdict(list)
        for row, send in self.received:
            if self._free(row) <= self._ends[send]:
                samples[self._boundary(send)].append(max(self._starts[row] - self._ends[send], 0.0))
        return samples

    def takes(self, hops: Mapping[int, float]) -> Samples[Kind]:
        """How long a rank is busy taking its input out of a message that must have been there already."""
        samples: dict[Kind, list[float]] = defaultdict(list)
        for row, send in self.received:
            hop = hops.get(self._boundary(send))
            if hop is not None and self._ends[send] + 2 * hop < self._free(row):
                samples[self.kind_of(row)].append(max(self._starts[row] - self._free(row), 0.0))
        return samples

    @cached_property
    def reductions(self) -> Samples[int]:
        """By stage: from when the last replica has come to a gradient's sum to the STEP that stood idle for it."""
        samples: dict[int, list[float]] = defaultdict(list)
        for steps in self._updates:
            sums = [(begun, step) for step in steps if (begun := self._begun(step)) is not None]
            at_once = self._is_at_once(steps)
            for begun, step in [max(sums)] if sums and at_once else sums:
                if (self._through_by(step) if at_once else self._free(step)) <= begun:
                    started = self._starts[steps[-1] if at_once else step]
                    samples[self._table.stage[step]].append(max(started - begun, 0.0))
        return samples

    @cached_property
    def _updates(self) -> list[list[int]]:
        """STEPs of one rank that follow each other."""
        joined: list[list[int]] = []
        for row in sorted(row for rows in self._table.rows_of(STEP).values() for row in rows):
            if joined and joined[-1][-1] == row - 1 and row not in self._table.first_row:
                joined[-1].append(row)
            else:
                joined.append([row])
        return joined

    def _is_at_once(self, steps: Sequence[int]) -> bool:
        """Whether a rank waits for and makes all of an update at the last of its STEPs, as the engine does."""
        took = [self._ends[step] - self._free(step) for step in steps]
        return sum(took[:-1]) <= 0.01 * took[-1]

    def _begun(self, step: int) -> float | None:
        """When the last replica has come to the sum of a STEP's gradient; None without replicas."""
        rank, stage = self._table.rank[step], self._table.stage[step]
        reductions = self._table.rows_of(REDUCE_GRADIENT)
        if (rank, stage) not in reductions:
            return None
        turn = self._table.rows_of(STEP)[rank, stage].index(step)
        together = [rows[turn] for (_, other), rows in reductions.items() if other == stage and turn < len(rows)]
        return max((self._ends[row] for row in together), default=None)

    @cached_property
    def _rows(self) -> list[int]:
        """What keeps a rank busy; a fused pair by its first row."""
        table = self._table
        return [row for row in range(len(table)) if table.operation[row] in _FIELDS and row - 1 not in table.fused]

    @cached_property
    def received(self) -> list[tuple[int, int]]:
        """Each computation whose input came in a message, with the SEND of it."""
        first, operation = self._first, self._table.operation
        return [(row, first[row]) for row in self._rows if first[row] >= 0 and operation[first[row]] in _SENDS]

    def kind_of(self, row: int) -> Kind:
        """What a row keeps its rank busy with."""
        table = self._table
        return _FIELDS[OVERLAP if row in table.fused else table.operation[row]], table.stage[row]

    def _boundary(self, send: int) -> int:
        return self._table.stage[send] - (self._table.operation[send] == SEND_GRADIENT)

    def _free(self, row: int) -> float:
        """When its rank was through with all that stands before it."""
        return self._ends[row - 1] if row > self._table.first_row[self._table.rank[row]] else -inf

    def _through_by(self, step: int) -> float:
        """When a rank was through with all that it computes before an update."""
        first = step
        while first > 0 and self._table.operation[first - 1] in (STEP, REDUCE_GRADIENT):
            first -= 1
        return self._free(first)

    def _last_of(self, row: int) -> int:
        """The last row before the next that keeps the rank busy by itself."""
        table = self._table
        end = table.first_row[table.rank[row] + 1]
        row += row in table.fused
        while row + 1 < end and table.operation[row + 1] not in _FIELDS:
            row += 1
        return row


def _means(samples: Samples[Key]) -> dict[Key, list[float]]:
    """One number a key."""
    return {key: [fmean(values)] for key, values in samples.items()}


def _merged(many: Iterable[Samples[Key]]) -> dict[Key, list[float]]:
    """All that was seen in several timelines."""
    merged: dict[Key, list[float]] = defaultdict(list)
    for samples in many:
        for key, values in samples.items():
            merged[key] += values
    return merged


def _costs(durations: Mapping[Kind, float], num_stages: int) -> Costs:
    """Costs with a number for every stage, of the kinds that occur."""
    fields = {name: tuple(_duration_of(name, stage, durations) for stage in range(num_stages)) for name, _ in durations}
    return Costs(**fields)  # type: ignore[arg-type]  # the names are those of its fields


def _duration_of(name: str, stage: int, durations: Mapping[Kind, float]) -> float:
    """What a kind takes on a stage; where it never ran there alone, by what others of its kinds say of it.

    B is I and W together; anything else grows with the stages' forwards.
    """
    own = {kind: duration for (kind, of), duration in durations.items() if of == stage}
    if name in own:
        return own[name]
    if name == "backward" and "input_gradient" in own and "weight_gradient" in own:
        return own["input_gradient"] + own["weight_gradient"]
    elsewhere = {of: duration for (kind, of), duration in durations.items() if kind == name}
    if name != "step" and own.get("forward"):
        forwards = {of: durations.get(("forward", of), 0.0) for of in elsewhere}
        ratios = [duration / forwards[of] for of, duration in elsewhere.items() if forwards[of]]
        if ratios:
            return own["forward"] * fmean(ratios)
    return fmean(elsewhere.values())
