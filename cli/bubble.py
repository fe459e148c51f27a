"""The bubble of a run, three ways: as theory has it, as simulated, as measured."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean, median
from typing import Final

from stagewright.schedules import Costs, Formula, Schedule, Timeline, simulate
from stagewright.schedules.formula import Measure
from stagewright.schedules.instructions import (
    Backward,
    Forward,
    InputGradient,
    Instruction,
    Overlap,
    Step,
    WeightGradient,
)

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


def mean_costs(timelines: Sequence[Timeline]) -> Costs:
    """Average the measured durations, stage by stage and kind by kind.

    A kind that some stage never computes on its own, because it is always half of a fused pair there, costs what it
    does on the average of the other stages.
    """
    durations: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for timeline in timelines:
        for events in timeline.events:
            for event in events:
                cost = cost_of(event.instruction)
                if cost is not None:
                    name, stage = cost
                    durations[name][stage].append(event.end - event.start)
    stages = range(timelines[0].program.num_stages)
    means: dict[str, tuple[float, ...]] = {}
    for name, of_stage in durations.items():
        elsewhere = fmean(map(fmean, of_stage.values()))
        means[name] = tuple(fmean(of_stage[stage]) if stage in of_stage else elsewhere for stage in stages)
    return Costs(
        forward=means.get("forward", 1.0),
        backward=means.get("backward"),
        input_gradient=means.get("input_gradient"),
        weight_gradient=means.get("weight_gradient"),
        overlapped=means.get("overlapped"),
        step=means.get("step", 0.0),
    )


def cost_of(instruction: Instruction) -> tuple[str, int] | None:
    """Name the field of Costs that an instruction's duration belongs to, and the stage; None where it has no cost.

    What goes on while its rank does something else, such as a message or a sum over ranks, has none.
    """
    match instruction:
        case Forward(stage):
            return "forward", stage
        case Backward(stage):
            return "backward", stage
        case InputGradient(stage):
            return "input_gradient", stage
        case WeightGradient(stage):
            return "weight_gradient", stage
        case Overlap(forward, _):
            return "overlapped", forward.stage
        case Step(stage):
            return "step", stage
        case _:
            return None
