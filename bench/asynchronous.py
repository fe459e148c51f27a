"""What a pipeline that never flushes gains: the steady time of a batch under 2bw against 1f1b.

`python -m stagewright.bench.asynchronous`. Both train in the same processes by turns, many batches at a time; of each
run the first batches are dropped, in which the pipeline fills. Where stages take equal times F and B, a batch takes
(M+P-1)(F+B) with a flush and M(F+B) without, so (M+P-1)/M is the most that can be gained.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final, TypeAlias

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from stagewright.bench.stages import SleepStage, WorkStage
from stagewright.cli.values import count, positive
from stagewright.engine import Pipeline, RankContext, launch_local

# Which part of the ideal gain sleeping stages must reach: they leave the processors to the engine.
LEAST_SHARE: Final = 0.95
SCHEDULES: Final = ("1f1b", "2bw")
# Batches in which the pipeline fills, and buffers grow to their sizes.
_NUM_DROPPED: Final = 3

# By schedule, the seconds a batch of each round.
Periods: TypeAlias = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Args:
        name: what the stages do.
        num_ranks, num_microbatches: the shape.
        build_stage: makes a stage.
        rows, width: of a batch, [rows, width].
        barred: whether the bar holds for it.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    build_stage: Callable[[int], nn.Module]
    rows: int
    width: int
    barred: bool

    @property
    def ideal(self) -> float:
        """(M+P-1)/M."""
        return (self.num_microbatches + self.num_ranks - 1) / self.num_microbatches


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; the exit code is 1 where the bar is missed."""
    parsed = _parser().parse_args(arguments)
    console = Console()
    console.print("steady time of a batch: 1f1b with its flush, 2bw without", style="bold")
    table = _table()
    missed = False
    for case in _cases(parsed.forward, parsed.backward):
        if case.name not in parsed.stages:
            continue
        periods = measure(case, parsed.batches, parsed.rounds)
        table.add_row(*cells_of(case, periods))
        missed |= case.barred and gain(periods) < LEAST_SHARE * case.ideal
    console.width = max(console.width, 100)
    console.print(table)
    console.print(
        f"median (least .. most) over {parsed.rounds} rounds of {parsed.batches} batches each, by turns. bar: sleeping "
        f"stages reach {LEAST_SHARE:.0%} of the ideal gain (M+P-1)/M (! where not). Working stages need a processor "
        "each, which nobody else uses.",
        style="dim",
        highlight=False,
    )
    return int(missed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stagewright.bench.asynchronous", description=__doc__)
    parser.add_argument(
        "--stages", nargs="+", choices=("sleep", "work"), default=["sleep", "work"], help="what they do (default both)"
    )
    parser.add_argument("--forward", type=positive, default=10.0, metavar="MS", help="a forward (default 10 ms)")
    parser.add_argument("--backward", type=positive, default=20.0, metavar="MS", help="a backward (default 20 ms)")
    parser.add_argument("--batches", type=count, default=10, metavar="N", help="counted in each run (default 10)")
    parser.add_argument("--rounds", type=count, default=8, metavar="N", help="runs of either schedule (default 8)")
    return parser


def _cases(forward: float, backward: float) -> list[Case]:
    sleep = partial(sleep_stage, forward / 1e3, backward / 1e3)
    return [
        *(Case("sleep", 4, count, sleep, rows=count, width=8, barred=True) for count in (4, 8)),
        *(Case("work", 2, count, work_stage, rows=64 * count, width=512, barred=False) for count in (4, 8)),
    ]


def measure(case: Case, num_batches: int, num_rounds: int) -> Periods:
    """Train by both schedules by turns, and give the steady seconds a batch of each round."""
    of_ranks = launch_local(_train, case.num_ranks, args=(case, num_batches, num_rounds))
    return {
        schedule: [period_of([ends[schedule][turn] for ends in of_ranks]) for turn in range(num_rounds)]
        for schedule in SCHEDULES
    }


def period_of(ends: Sequence[Sequence[float]]) -> float:
    """The seconds a batch of the slowest rank, from when each rank was through with each batch that counts."""
    return max((of_rank[-1] - of_rank[0]) / (len(of_rank) - 1) for of_rank in ends)


def gain(periods: Periods) -> float:
    """How many times as fast 2bw is, by the medians."""
    return median(periods["1f1b"]) / median(periods["2bw"])


def _train(context: RankContext, case: Case, num_batches: int, num_rounds: int) -> dict[str, list[list[float]]]:
    """One rank: by schedule and round, when it was through with the last dropped batch, and with each after it."""
    torch.set_num_threads(1)
    pipes = {schedule: _pipeline(context, case, schedule) for schedule in SCHEDULES}
    x, y = torch.randn(case.rows, case.width), torch.randn(case.rows, case.width)
    ends: dict[str, list[list[float]]] = {schedule: [] for schedule in SCHEDULES}
    for _ in range(num_rounds):
        for schedule, pipe in pipes.items():
            times = []
            for _ in range(_NUM_DROPPED + num_batches):
                pipe.train_step(x, y)
                times.append(time.perf_counter())
            pipe.flush()
            ends[schedule].append(times[_NUM_DROPPED - 1 :])
    return ends


def _pipeline(context: RankContext, case: Case, schedule: str) -> Pipeline:
    return Pipeline(
        case.build_stage,
        schedule=schedule,
        num_microbatches=case.num_microbatches,
        loss_fn=_squared_error,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        transport=context.transport,
    )


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def sleep_stage(forward: float, backward: float, stage: int) -> nn.Module:
    """A stage that takes so many seconds, asleep."""
    return SleepStage(forward, backward)


def work_stage(stage: int) -> nn.Module:
    """A stage that takes some milliseconds of a processor."""
    return WorkStage(num_layers=8, width=512)


def _table() -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("stages", no_wrap=True)
    for heading in ("P", "M", *(f"{schedule}, ms" for schedule in SCHEDULES), "gain", "ideal", "of ideal"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def cells_of(case: Case, periods: Periods) -> list[str | Text]:
    """A line of the table."""
    share = gain(periods) / case.ideal
    holds = not case.barred or share >= LEAST_SHARE
    return [
        case.name,
        str(case.num_ranks),
        str(case.num_microbatches),
        *(_spread(periods[schedule]) for schedule in SCHEDULES),
        f"{gain(periods):.3f}",
        f"{case.ideal:.3f}",
        Text(f"{share:.1%}", style="bold") if holds else Text(f"{share:.1%} !", style="bold red"),
    ]


def _spread(seconds: Sequence[float]) -> str:
    least, most = min(seconds), max(seconds)
    return f"{1e3 * median(seconds):.1f} ({1e3 * least:.1f} .. {1e3 * most:.1f})"


if __name__ == "__main__":
    sys.exit(main())
