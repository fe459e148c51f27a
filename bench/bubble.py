"""Whether the bubbles are real: formula, simulated and measured for every schedule, with stages that sleep.

`python -m stagewright.bench.bubble`. Asleep a stage needs no processor, so what a step takes beyond the simulation
without communication is what the engine, its messages and the machine add. Each schedule runs by turns with torch's,
where torch has it, and 1f1b also with a loop written by hand. Before each step all ranks wait for each other; it ends
when the last rank is through. An asynchronous schedule has no such steps: there it is the steady time of a batch. For
all ways alike, each rank keeps to one processor, and stages are awake for the last of their time.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from stagewright.bench.command import run_bench
from stagewright.bench.paired import Turn, take_turns, together
from stagewright.bench.peers import TORCH_SCHEDULES, OneForwardOneBackwardLoop, TorchPeer, make_group, squared_error
from stagewright.bench.prediction import interval, steps_of
from stagewright.bench.report import Section, marked
from stagewright.bench.stages import Begin, Clock, End, HalvedSleepStage, stay_on_one_processor
from stagewright.cli.compare import create_for, share_of
from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.schedules import Costs, Schedule, ScheduleError, find, names, simulate

NUM_RANKS: Final = 4
NUM_MICROBATCHES: Final = 8
NUM_STEPS: Final = 9  # of each way
# A rank's F, and its I and W, which make up B, in seconds.
SECONDS: Final = 0.010
COSTS: Final = Costs(forward=SECONDS, backward=2 * SECONDS, input_gradient=SECONDS, weight_gradient=SECONDS)
# What a step may take beyond the ideal, with one stage a rank and with more; and beyond the loop written by hand.
MOST_FLAT: Final = 0.04
MOST_CHUNKED: Final = 0.07
MOST_OVER_HAND: Final = 0.01

_WIDTH: Final = 8
_STEADY_BATCHES: Final = 6
_NUM_TOGETHER: Final = 6
_SPLIT: Final = ("interleaved-zb", "zbv", "dualpipev")  # of torch's, those whose backward comes in two halves


@dataclass(frozen=True)
class Outcome:
    """What one schedule took, in seconds.

    Args:
        schedule: it.
        costs: of one of its stages.
        steps: by way: ours, torch, by hand.
    """

    schedule: Schedule
    costs: Costs
    steps: Mapping[str, Sequence[float]]

    @property
    def ideal(self) -> float:
        """A step, or a batch in the steady state, if messages and everything else took no time."""
        if self.schedule.synchronous:
            return simulate(self.schedule.program(), self.costs).makespan
        return simulate(self.schedule.program(_STEADY_BATCHES), self.costs).steady_period

    @property
    def busy(self) -> float:
        """What a rank computes in a batch; with less than all of its stages for each microbatch under two routes."""
        return NUM_MICROBATCHES * 3 * SECONDS

    @property
    def most(self) -> float:
        """The bar."""
        return MOST_FLAT if num_chunks(self.schedule) <= 1 else MOST_CHUNKED

    def over(self, way: str) -> float | None:
        """How much longer than the ideal the median step was, as a share of it; None where there is no such way."""
        return median(self.steps[way]) / self.ideal - 1 if way in self.steps else None

    def bubble(self, seconds: float) -> float:
        """The share of all rank time of such a step that is spent waiting."""
        return 1 - self.busy / seconds


def num_chunks(schedule: Schedule) -> float:
    """Stages through which a microbatch goes on one rank."""
    return schedule.placement.num_stages / schedule.num_ranks


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; the exit code is 1 where a bar is missed."""
    return run_bench("bubble", measure, arguments, description=__doc__, num_steps=NUM_STEPS, steps="of each way")


def measure(
    only: Sequence[str] | None = None,
    num_steps: int = NUM_STEPS,
    track: Callable[[Sequence[Sequence[Schedule]]], Iterable[Sequence[Schedule]]] = iter,
) -> Section:
    """Measure every schedule that the engine runs in this shape, or those named.

    Args:
        only: names.
        num_steps: of each way.
        track: passes the schedules on, some at a time, and may show how far it is.
    """
    some = in_some(schedules_of(only))
    return section_of([outcome for schedules in track(some) for outcome in outcomes_of(schedules, num_steps)])


def in_some(schedules: Sequence[Schedule]) -> list[Sequence[Schedule]]:
    """Those that are measured in the same processes, since it takes seconds to start some."""
    return [schedules[first : first + _NUM_TOGETHER] for first in range(0, len(schedules), _NUM_TOGETHER)]


def schedules_of(only: Sequence[str] | None) -> list[Schedule]:
    """Every schedule that the engine runs in this shape, or those named."""
    made = []
    for name in only or names():
        try:
            if find(name).runnable:
                made.append(create_for(name, NUM_RANKS, NUM_MICROBATCHES, None, COSTS)[0])
        except ScheduleError:
            if only:
                raise
    return made


def outcomes_of(schedules: Sequence[Schedule], num_steps: int) -> list[Outcome]:
    """Measure some schedules in the same processes."""
    of_ranks = launch_local(_rank, NUM_RANKS, args=(schedules, num_steps))
    return [_outcome_of(*measured) for measured in zip(schedules, zip(*of_ranks))]


def _outcome_of(schedule: Schedule, of_ranks: Sequence[Mapping[str, Sequence[Turn]]]) -> Outcome:
    costs = COSTS.scaled(share_of(schedule))
    if schedule.synchronous:
        rounds = together(of_ranks)
        return Outcome(schedule, costs, {way: [turn.wall for turn in rounds[way]] for way in rounds})
    ticks = [[(turn.start, turn.end) for turn in of_rank["ours"]] for of_rank in of_ranks]
    return Outcome(schedule, costs, {"ours": steps_of(ticks, synchronous=False)})


def _rank(context: RankContext, schedules: Sequence[Schedule], num_steps: int) -> list[dict[str, list[Turn]]]:
    """One rank: of each schedule when its steps began and ended, by way."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stay_on_one_processor(context.rank)
    group = make_group()
    return [_turns_of(context, schedule, num_steps, group) for schedule in schedules]


def _turns_of(
    context: RankContext, schedule: Schedule, num_steps: int, group: dist.ProcessGroup
) -> dict[str, list[Turn]]:
    x, y = torch.randn(2, NUM_MICROBATCHES, _WIDTH)
    pipe = Pipeline(
        partial(our_stage, share_of(schedule)),
        schedule=schedule,
        loss_fn=squared_error,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        transport=context.transport,
    )
    if not schedule.synchronous:
        return {"ours": _follow_each_other(pipe, x, y, num_steps)}
    ways: dict[str, Callable[[], object]] = {"ours": partial(pipe.train_step, x, y)}
    if schedule.name in TORCH_SCHEDULES:
        ways["torch"] = partial(_torch_peer(context, schedule, group).step, x, y)
    if schedule.name == "1f1b":
        module = our_stage(1.0, context.rank)
        loop = OneForwardOneBackwardLoop(context, module, NUM_MICROBATCHES, squared_error, group)
        ways["by hand"] = partial(loop.step, x, y)
    return take_turns(context, ways, num_steps, num_dropped=2)


def _follow_each_other(pipe: Pipeline, x: Tensor, y: Tensor, num_steps: int) -> list[Turn]:
    """Batches of a pipeline that stays full."""
    turns = []
    for _ in range(NUM_RANKS + num_steps + 1):
        cpu, start = time.process_time(), time.perf_counter()
        pipe.train_step(x, y)
        turns.append(Turn(start, time.perf_counter(), time.process_time() - cpu))
    pipe.flush()
    return turns[NUM_RANKS:]


def _torch_peer(context: RankContext, schedule: Schedule, group: dist.ProcessGroup) -> TorchPeer:
    stage = TorchHalvedSleepStage if schedule.name in _SPLIT else HalvedSleepStage
    share = SECONDS * share_of(schedule)
    modules: dict[int, nn.Module] = {
        index: stage(share, share, share) for index in schedule.placement.stages_of(context.rank)
    }
    shape = (schedule.placement.num_stages, NUM_MICROBATCHES)
    return TorchPeer(schedule.name, modules, *shape, squared_error, group)


def our_stage(share: float, stage: int) -> nn.Module:
    """A stage whose F, I and W take a share of a rank's time, asleep."""
    seconds = SECONDS * share
    return HalvedSleepStage(seconds, seconds, seconds, _WIDTH)


class TorchHalvedSleepStage(nn.Module):
    """The same for torch's way of splitting a backward: W is what lies between the weight and its use.

    Args:
        forward_seconds, input_seconds, weight_seconds: how long F, I and W take.
    """

    def __init__(self, forward_seconds: float, input_seconds: float, weight_seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self.seconds = (forward_seconds, input_seconds)
        self.weight_seconds = weight_seconds
        self.anchor = torch.zeros(0, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, and let both halves of the backward sleep; where they come in one, I before W."""
        clock = Clock()
        forward_seconds, input_seconds = self.seconds
        weight = _SleepingWeight.apply(self.linear.weight, self.weight_seconds)  # type: ignore[no-untyped-call]
        x = Begin.apply(x, self.anchor, clock, input_seconds)  # type: ignore[no-untyped-call]
        y = functional.linear(x, weight, self.linear.bias)
        output: Tensor = End.apply(y, clock, forward_seconds)  # type: ignore[no-untyped-call]
        return output


class _SleepingWeight(torch.autograd.Function):
    """A weight whose gradient takes its time."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor, None]:
        Clock().rest(ctx.seconds)
        return dw, None


def section_of(outcomes: Sequence[Outcome]) -> Section:
    """The table, and the bars of what each way adds."""
    bars: dict[str, dict[str, float]] = {}
    for outcome in outcomes:
        overs = {way: outcome.over(way) for way in ("ours", "torch", "by hand")}
        bars[outcome.schedule.name] = {way: 100 * over for way, over in overs.items() if over is not None}
    return Section(
        name="bubble",
        title=f"steps of sleeping stages over the zero-communication ideal: P={NUM_RANKS}, M={NUM_MICROBATCHES}, "
        f"F=I=W={1e3 * SECONDS:g} ms",
        columns=(
            *("schedule", "V", "bubble by formula", "simulated", "measured", "ideal, ms"),
            *("measured, ms [95 %]", "over", "bar", "torch over", "by hand over"),
        ),
        rows=tuple(map(_row_of, outcomes)),
        note=f"Medians of {min(len(outcome.steps['ours']) for outcome in outcomes)} or more steps, by turns with torch "
        "and a hand-written loop in the same processes. Bubbles are idle / (P x step), of the makespan for synchronous "
        "schedules and of the steady period for asynchronous ones; a formula that speaks of the per-rank span is "
        f"marked so. By hand: ours may be {MOST_OVER_HAND:.0%} of the ideal above it.",
        bars=bars,
        unit=" %",
    )


def _row_of(outcome: Outcome) -> tuple[str, ...]:
    ours, hand = outcome.over("ours"), outcome.over("by hand")
    assert ours is not None, "ours was measured"
    formula = outcome.schedule.bubble_formula(outcome.costs)
    span = " of the span" if formula is not None and formula.measure == "span" else ""
    low, high = (1e3 * seconds for seconds in interval(outcome.steps["ours"]))
    step = median(outcome.steps["ours"])
    return (
        outcome.schedule.name,
        f"{num_chunks(outcome.schedule):g}",
        "" if formula is None else f"{formula.fraction:.1%}{span}",
        f"{outcome.bubble(outcome.ideal):.1%}",
        f"{outcome.bubble(step):.1%}",
        f"{1e3 * outcome.ideal:.1f}",
        f"{1e3 * step:.1f} [{low:.1f} .. {high:.1f}]",
        marked(f"{ours:+.1%}", ours <= outcome.most),
        f"{outcome.most:.0%}",
        _percent(outcome.over("torch")),
        "" if hand is None else marked(_percent(hand), ours - hand <= MOST_OVER_HAND),
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"


if __name__ == "__main__":
    sys.exit(main())
