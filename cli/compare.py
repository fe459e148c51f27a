"""Comparing all schedules on one shape: what theory says of each, what simulation says, and what one really gets."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

from stagewright.schedules import Costs, Formula, Schedule, ScheduleError, Timeline, create, find, names, simulate
from stagewright.schedules.instructions import SendActivation, SendGradient

# Batches after which an asynchronous pipeline is full, and still has one to drain.
_STEADY_BATCHES = 4
_NO_OPTIONS: Final[Mapping[str, object]] = MappingProxyType({})


@dataclass(frozen=True)
class Figures:
    """What there is to say of one schedule; times are in the unit of the costs.

    Args:
        schedule: the schedule, on the shape that is compared.
        formula: the bubble that theory promises, where it does.
        formula_holds: whether the simulation finds that very bubble.
        makespan_bubble: idle share of the makespan: of one batch alone, its pipeline filled and drained.
        span_bubble: idle share of the longest any single rank takes for that.
        steady_bubble: idle share of the time per batch when batches follow each other.
        time: what a batch really takes (see ``really``).
        peak_stash: most stashes on any rank, in whole microbatches of a rank's share of the model.
        peak_bytes: most bytes stashed on any rank.
        num_versions: weight versions that a rank keeps at most.
        num_copies: ranks that hold a copy of the same stage.
        sends: messages per microbatch, both ways.
    """

    schedule: Schedule
    formula: Formula | None
    formula_holds: bool
    makespan_bubble: float
    span_bubble: float
    steady_bubble: float
    time: float
    peak_stash: float
    peak_bytes: float
    num_versions: int
    num_copies: int
    sends: float


@dataclass(frozen=True)
class Refusal:
    """A schedule that does not serve the shape, or does not fit in memory, and why."""

    name: str
    reason: str


def compare(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None,
    costs: Costs,
    memory_cap: float | None = None,
    options: Mapping[str, object] = _NO_OPTIONS,
) -> tuple[list[Figures], list[Refusal]]:
    """Simulate every registered schedule on one shape; the fastest comes first.

    Args:
        num_ranks, num_microbatches: the shape.
        num_chunks: stages a rank, for the schedules that let one choose; otherwise their own default.
        costs: of a whole rank's share of the model; a chunk costs its share of that.
        memory_cap: the most that a rank may stash, in the unit of ``costs.activation_bytes`` and ``weight_bytes``.
        options: of schedules, for those that have them.

    Raises:
        ScheduleError: no schedule has one of the options.
    """
    takers = {option: [name for name in names() if option in _options_of(name)] for option in options}
    for option, having in takers.items():
        if not having:
            known = sorted({option for name in names() for option in _options_of(name)})
            raise ScheduleError(f"no schedule has an option {option!r}: some have {', '.join(known)}")
    found: list[Figures] = []
    refused: list[Refusal] = []
    for name in names():
        try:
            schedule, of_stage = create_for(name, num_ranks, num_microbatches, num_chunks, costs, memory_cap, options)
            figures = figures_of(schedule, of_stage)
        except ScheduleError as error:
            refused.append(Refusal(name, str(error)))
            continue
        if memory_cap is not None and figures.peak_bytes > memory_cap * (1 + 1e-9):
            refused.append(Refusal(name, f"stashes {figures.peak_bytes:g}, more than the cap of {memory_cap:g}"))
        else:
            found.append(figures)
    return sorted(found, key=lambda figures: (figures.time, figures.peak_bytes)), refused


def create_for(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None,
    costs: Costs,
    memory_cap: float | None = None,
    options: Mapping[str, object] = _NO_OPTIONS,
) -> tuple[Schedule, Costs]:
    """A schedule with those of the options that it takes, and the costs of one of its stages.

    Raises:
        ScheduleError: the schedule does not serve this shape.
    """
    takes = {field.name for field in fields(find(name))}
    given = {"num_chunks": num_chunks, "memory_cap": memory_cap, **options}
    taken = {option: value for option, value in given.items() if option in takes and value is not None}
    schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **taken)
    of_stage = costs.scaled(share_of(schedule))
    if "costs" in takes:
        taken["costs"] = of_stage
        schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **taken)
    return schedule, of_stage


def _options_of(name: str) -> set[str]:
    """The options of a schedule's own."""
    return {field.name for field in fields(find(name))} - {"num_ranks", "num_microbatches", "num_chunks", "costs"}


def share_of(schedule: Schedule) -> float:
    """The work of one stage for one unit, as a share of that of a rank's whole part of the model for one microbatch."""
    return schedule.num_ranks / schedule.num_stages * schedule.num_microbatches / schedule.num_units


def figures_of(schedule: Schedule, costs: Costs) -> Figures:
    """Simulate one schedule with the costs of its stages."""
    program = schedule.program()
    timeline = simulate(program, costs)
    steady = timeline if schedule.synchronous else simulate(schedule.program(_STEADY_BATCHES), costs)
    formula = schedule.bubble_formula(costs)
    placement = schedule.placement
    num_sends = sum(
        isinstance(instruction, SendActivation | SendGradient) for stream in program.streams for instruction in stream
    )
    return Figures(
        schedule=schedule,
        formula=formula,
        formula_holds=formula is not None and formula.agrees_with(steady if formula.measure == "steady" else timeline),
        makespan_bubble=timeline.bubble_fraction,
        span_bubble=timeline.span_bubble,
        steady_bubble=steady.steady_bubble,
        time=really(schedule, timeline, steady),
        peak_stash=max(steady.peak_stash) * share_of(schedule),
        peak_bytes=max(steady.peak_bytes),
        num_versions=max(program.updates.num_versions),
        num_copies=max(len(placement.replicas_of(stage)) for stage in range(placement.num_stages)),
        sends=num_sends / schedule.num_microbatches,
    )


def really(schedule: Schedule, timeline: Timeline, steady: Timeline) -> float:
    """What a batch takes in a trainer that clips by the global gradient norm, or watches for overflow.

    That needs every rank's gradient before the optimizer steps, so a synchronous schedule takes its makespan. An
    asynchronous one computes on with older weights meanwhile: it takes its steady period.
    """
    return timeline.makespan if schedule.synchronous else steady.steady_period
