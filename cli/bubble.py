"""The bubble of a run, three ways: as theory has it, as simulated, as measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Final

from stagewright.schedules import Formula, Schedule, Timeline, simulate
from stagewright.schedules.fitting import mean_costs
from stagewright.schedules.formula import Measure

_DENOMINATORS: Final[dict[Measure, str]] = {
    "makespan": "idle / (ranks x makespan)",
    "span": "idle / longest rank's span",
    "steady": "idle / steady period, busiest rank",
}
# Batches of a simulation that shows an asynchronous pipeline once it is full.
_STEADY_BATCHES: Final = 4


@dataclass(frozen=True)
class MeasuredStep:
    """One training step as it was.

    Args:
        timeline: what every rank did, in seconds.
        seconds: how long the step took each rank in all.
    """

    timeline: Timeline
    seconds: tuple[float, ...]

    @property
    def steady_bubble(self) -> float:
        """The share of its step for which the busiest rank stood idle, where one step leads over to the next."""
        return min(1 - busy / seconds for busy, seconds in zip(self.timeline.busy, self.seconds))


@dataclass(frozen=True)
class Bubble:
    """Idle time as a share of all rank time, three ways of knowing the same fraction; `denominator` says which."""

    formula: float | None
    formula_text: str | None
    simulated: float
    measured: float
    denominator: str


def compare_bubble(schedule: Schedule, steps: Sequence[MeasuredStep]) -> Bubble:
    """Compare the bubble of some measured steps with that predicted from their own mean durations.

    The fraction is the makespan's, unless theory speaks of the per-rank span. An asynchronous schedule has no step that
    ends, and so no makespan: there it is that of the steady state.
    """
    costs = mean_costs([step.timeline for step in steps])
    formula = schedule.bubble_formula(costs)
    if not schedule.synchronous:
        simulated = simulate(schedule.program(_STEADY_BATCHES), costs).steady_bubble
        measured = median(step.steady_bubble for step in steps)
        return _bubble(formula, "steady", simulated, measured)
    measure: Measure = "span" if formula is not None and formula.measure == "span" else "makespan"
    fraction: Callable[[Timeline], float] = attrgetter("span_bubble" if measure == "span" else "bubble_fraction")
    simulated = fraction(simulate(steps[0].timeline.program, costs))
    return _bubble(formula, measure, simulated, median(fraction(step.timeline) for step in steps))


def _bubble(formula: Formula | None, measure: Measure, simulated: float, measured: float) -> Bubble:
    """All three; a formula that speaks of something else is left out."""
    if formula is None or formula.measure != measure:
        return Bubble(None, None, simulated, measured, _DENOMINATORS[measure])
    return Bubble(formula.fraction, formula.text, simulated, measured, _DENOMINATORS[measure])
