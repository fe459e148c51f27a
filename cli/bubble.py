"""The bubble of a run, three ways: as theory has it, as simulated, as measured."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean, median

from stagewright.schedules import Costs, Schedule, Timeline, simulate
from stagewright.schedules.instructions import (
    Backward,
    Forward,
    InputGradient,
    Instruction,
    Overlap,
    WeightGradient,
)


@dataclass(frozen=True)
class Bubble:
    """Idle time as a share of all rank time, three ways of knowing the same fraction; `denominator` says which."""

    formula: float | None
    formula_text: str | None
    simulated: float
    measured: float
    denominator: str


def compare_bubble(schedule: Schedule, timelines: Sequence[Timeline]) -> Bubble:
    """Compare the bubble of some measured steps with that predicted from their own mean durations.

    The fraction is the makespan's, unless theory speaks of the per-rank span. What it says of a steady state without
    flushes cannot be compared with single steps, and is left out.
    """
    costs = mean_costs(timelines)
    formula = schedule.bubble_formula(costs)
    if formula is not None and formula.measure == "steady":
        formula = None
    of_span = formula is not None and formula.measure == "span"
    fraction: Callable[[Timeline], float] = attrgetter("span_bubble" if of_span else "bubble_fraction")
    return Bubble(
        formula=None if formula is None else formula.fraction,
        formula_text=None if formula is None else formula.text,
        simulated=fraction(simulate(timelines[0].program, costs)),
        measured=median(map(fraction, timelines)),
        denominator="idle / longest rank's span" if of_span else "idle / (ranks x makespan)",
    )


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
    )


def cost_of(instruction: Instruction) -> tuple[str, int] | None:
    """Name the field of Costs that an instruction's duration belongs to, and the stage; None where it has no cost."""
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
        case _:
            return None
