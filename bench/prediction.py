"""Whether a run takes the time that was predicted for it: every schedule, calibrated on a few of its own steps.

`python -m stagewright.bench.prediction`. On 4 ranks stages sleep, so that no processor is short; on 2 they compute. A
pipeline trains some steps, from which `calibrate` takes the costs, and the simulator from these the time of a step;
then as many others are timed, and so on by turns. Before each step all ranks wait for each other, and it ends
when the last rank is through. An asynchronous schedule has no such steps: there it is the steady time of a batch.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Final

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from stagewright.bench.stages import HalvedSleepStage, WorkStage
from stagewright.cli.values import count, positive
from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.schedules import Costs, Schedule, ScheduleError, create, find, names, simulate
from stagewright.schedules.recording import Recording

# How far the median of the measured steps may be from what was predicted.
MOST_ERROR: Final = 0.05
# Steps in which buffers grow to their sizes, an asynchronous pipeline fills, and a processor speeds up.
_NUM_DROPPED: Final = 2
# Batches of a simulation that shows an asynchronous pipeline once it is full.
_STEADY_BATCHES: Final = 6
_NUM_RESAMPLES: Final = 1000


@dataclass(frozen=True)
class Plan:
    """How often each schedule is measured: rounds of some steps to calibrate on, and as many to be timed."""

    num_rounds: int
    num_steps: int


@dataclass(frozen=True)
class Case:
    """Stages and a shape.

    Args:
        name: what the stages do.
        num_ranks, num_microbatches: the shape.
        build_stage: makes a stage, given how many stages a rank has and the stage's number.
        rows, width: of a batch, [rows, width].
    """

    name: str
    num_ranks: int
    num_microbatches: int
    build_stage: Callable[[int, int], nn.Module]
    rows: int
    width: int


@dataclass(frozen=True)
class Outcome:
    """One line of the table, in seconds.

    Args:
        case, schedule: their names.
        predicted: a step, by each round.
        measured: each step that was timed.
    """

    case: str
    schedule: str
    predicted: tuple[float, ...]
    measured: tuple[float, ...]

    @property
    def error(self) -> float:
        """How much longer the median step was than predicted by the median, as a share of that."""
        return median(self.measured) / median(self.predicted) - 1

    @property
    def holds(self) -> bool:
        """Whether that is within the bar."""
        return abs(self.error) <= MOST_ERROR


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; the exit code is 1 where the bar is missed."""
    parsed = _parser().parse_args(arguments)
    if parsed.trace is not None:
        parsed.trace.mkdir(parents=True, exist_ok=True)
    console = Console()
    console.width = max(console.width, 100)
    console.print("time of a step: predicted from calibrated costs, and measured", style="bold")
    table = _table()
    plan = Plan(parsed.rounds, parsed.steps)
    outcomes: list[Outcome] = []
    for case in cases(parsed.forward):
        if case.name in parsed.stages:
            outcomes += measure(case, schedules_of(case, parsed.only), plan, parsed.trace)
    for outcome in outcomes:
        table.add_row(*cells_of(outcome))
    console.print(table)
    console.print(
        f"medians of {plan.num_rounds} rounds of {plan.num_steps} steps [95 % bootstrap interval]. bar: within "
        f"{MOST_ERROR:.0%} of the prediction (! where not). Working stages need a processor each, "
        "which nobody else uses.",
        style="dim",
        highlight=False,
    )
    return int(not all(outcome.holds for outcome in outcomes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stagewright.bench.prediction", description=__doc__)
    parser.add_argument(
        "--stages", nargs="+", choices=("sleep", "work"), default=["sleep", "work"], help="what they do (default both)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=names(), help="of these schedules alone (default all)"
    )
    parser.add_argument("--forward", type=positive, default=10.0, metavar="MS", help="a rank's forward (default 10 ms)")
    parser.add_argument("--rounds", type=count, default=5, metavar="N", help="of calibrating and measuring (default 5)")
    parser.add_argument("--steps", type=count, default=3, metavar="N", help="to calibrate on, and timed (default 3)")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="write traces here, for `stagewright explain`")
    return parser


def cases(forward: float) -> list[Case]:
    """Sleeping stages on 4 ranks, of which F = I = W take so many milliseconds; working ones on 2."""
    return [
        Case("sleep", 4, 8, partial(sleep_stage, forward / 1e3), rows=8, width=8),
        Case("work", 2, 8, work_stage, rows=8 * 192, width=512),
    ]


def schedules_of(case: Case, only: Sequence[str] | None) -> list[Schedule]:
    """Every schedule that the engine runs in this shape, or those that are named."""
    made = []
    for name in only or names():
        if not find(name).runnable:
            continue
        try:
            made.append(create(name, num_ranks=case.num_ranks, num_microbatches=case.num_microbatches))
        except ScheduleError:
            if only:
                raise
    return made


def measure(case: Case, schedules: Sequence[Schedule], plan: Plan, trace: Path | None = None) -> list[Outcome]:
    """Calibrate, predict and measure each schedule."""
    of_ranks = launch_local(_train, case.num_ranks, args=(case, schedules, plan, trace))
    outcomes = []
    for index, schedule in enumerate(schedules):
        predicted = of_ranks[0][index][0]
        steps: list[float] = []
        for turn in range(plan.num_rounds):
            steps += steps_of([of_rank[index][1][turn] for of_rank in of_ranks], schedule.synchronous)
        outcomes.append(Outcome(case.name, schedule.name, tuple(predicted), tuple(steps)))
    return outcomes


def steps_of(ticks: Sequence[Sequence[tuple[float, float]]], synchronous: bool) -> tuple[float, ...]:
    """How long each step was, from when each rank began and ended it.

    It lasts from the first rank's begin to the last one's end; or, where steps lead over to each other, from the end
    of the one before to its own, on the average of the ranks.
    """
    steps = list(zip(*ticks))
    if synchronous:
        return tuple(max(end for _, end in step) - min(start for start, _ in step) for step in steps)
    ends = [fmean(end for _, end in step) for step in steps]
    return tuple(later - earlier for earlier, later in pairwise(ends))


def interval(values: Sequence[float], num_resamples: int = _NUM_RESAMPLES) -> tuple[float, float]:
    """Between which numbers the median lies with 95 %, by the bootstrap; the same for the same values."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(num_resamples))
    return medians[round(0.025 * (num_resamples - 1))], medians[round(0.975 * (num_resamples - 1))]


def _train(
    context: RankContext, case: Case, schedules: Sequence[Schedule], plan: Plan, trace: Path | None
) -> list[tuple[list[float], list[list[tuple[float, float]]]]]:
    """One rank: of each schedule what the rounds predicted, and when each of their steps began and ended here."""
    torch.set_num_threads(1)
    return [_train_by(context, case, schedule, plan, trace) for schedule in schedules]


def _train_by(
    context: RankContext, case: Case, schedule: Schedule, plan: Plan, trace: Path | None
) -> tuple[list[float], list[list[tuple[float, float]]]]:
    """One rank: what each round predicted, and when each of its steps began and ended here."""
    torch.manual_seed(0)
    x, y = torch.randn(case.rows, case.width), torch.randn(case.rows, case.width)
    pipe = Pipeline(
        partial(case.build_stage, schedule.placement.num_chunks),
        schedule=schedule,
        loss_fn=_squared_error,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        transport=context.transport,
    )
    predicted, ticks = [], []
    for _ in range(plan.num_rounds):
        _steps(context, pipe, x, y, _NUM_DROPPED + plan.num_steps, schedule)
        predicted.append(_predicted(pipe, schedule, pipe.calibrate(plan.num_steps)))
        # After the pause, too, the first steps find cold caches and a processor that has slowed down.
        timed = plan.num_steps + (not schedule.synchronous)
        ticks.append(_steps(context, pipe, x, y, _NUM_DROPPED + timed, schedule)[_NUM_DROPPED:])
    if trace is not None:
        recording = Recording.of(schedule.name, pipe.calibrate(), pipe.timelines())
        if context.rank == 0:
            (trace / f"{case.name}-{schedule.name}.json").write_text(recording.to_json(), encoding="utf-8")
    pipe.flush()
    return predicted, ticks


def _predicted(pipe: Pipeline, schedule: Schedule, costs: Costs) -> float:
    """What a step takes by the simulator; a batch in the steady state, where steps do not end."""
    if schedule.synchronous:
        return simulate(pipe.program, costs).makespan
    return simulate(schedule.program(_STEADY_BATCHES), costs).steady_period


def _steps(
    context: RankContext, pipe: Pipeline, x: Tensor, y: Tensor, count: int, schedule: Schedule
) -> list[tuple[float, float]]:
    """Make some steps; of a schedule whose steps end, all ranks begin each together."""
    ticks = []
    for _ in range(count):
        if schedule.synchronous:
            context.transport.gather(b"")
        start = time.perf_counter()
        pipe.train_step(x, y)
        ticks.append((start, time.perf_counter()))
    return ticks


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def sleep_stage(seconds: float, num_chunks: int, stage: int) -> nn.Module:
    """A stage whose F, I and W take a rank's so many seconds, asleep."""
    share = seconds / num_chunks
    return HalvedSleepStage(share, share, share)


def work_stage(num_chunks: int, stage: int) -> nn.Module:
    """A stage that takes some milliseconds of a processor."""
    return WorkStage(num_layers=max(8 // num_chunks, 1), width=512)


def _table() -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("stages", "schedule"):
        table.add_column(heading, no_wrap=True)
    for heading in ("predicted, ms", "measured, ms", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def cells_of(outcome: Outcome) -> list[str | Text]:
    """A line of the table."""
    low, high = interval(outcome.measured)
    error = f"{outcome.error:+.1%}"
    return [
        outcome.case,
        outcome.schedule,
        f"{1e3 * median(outcome.predicted):.1f}",
        f"{1e3 * median(outcome.measured):.1f} [{1e3 * low:.1f} .. {1e3 * high:.1f}]",
        Text(error) if outcome.holds else Text(f"{error} !", style="bold red"),
    ]


if __name__ == "__main__":
    sys.exit(main())
