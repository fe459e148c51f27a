"""How long it takes to create, verify and simulate every schedule, and how that grows with its size.

`python -m stagewright.bench.schedules`. Beside it, in the same run, what torch takes to build and lower those of
them that it has; it proves and simulates nothing. Times are CPU seconds of one core.
"""

import argparse
import gc
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from math import inf, log
from statistics import linear_regression
from time import process_time
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stagewright.bench.report import Section
from stagewright.bench.torch_schedules import TORCH_NAMES, build_and_lower
from stagewright.cli.values import count
from stagewright.schedules import ScheduleError, create, find, names, simulate

# The most that the largest shape may take, and by which power of the number of instructions the time may grow.
MOST_SECONDS: Final = 2.0
MOST_GROWTH: Final = 1.15
# A measurement is repeated until it has taken so long, or so often, and the fastest counts.
_LONG_ENOUGH: Final = 0.5
_OFTEN_ENOUGH: Final = 10


@dataclass(frozen=True)
class Measurement:
    """CPU seconds for one shape, and how many instructions it has; torch's seconds are None where not measured."""

    num_ranks: int
    num_instructions: int
    seconds: float
    torch_seconds: float | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; the exit code is 1 where a schedule that was named does not serve a shape."""
    parsed = _parser().parse_args(arguments)
    gc.freeze()  # what the imports left behind is none of what is measured
    logging.getLogger("torch").setLevel(logging.ERROR)
    console = Console()
    console.print(
        f"create + verify + simulate, CPU seconds; M = 4P, V = {parsed.chunks} where one can choose", style="bold"
    )
    table, is_refused = table_of(parsed.ranks), False
    for name in parsed.schedules or names():
        try:
            measurements = measure(name, sorted(parsed.ranks), parsed.chunks, parsed.torch_limit)
        except ScheduleError as error:
            console.print(f"{name}: {error}")
            is_refused |= name in parsed.schedules
            continue
        table.add_row(*_cells(name, measurements))
    console.width = max(console.width, 60 + 20 * len(parsed.ranks))
    console.print(table)
    console.print(
        f"bar: at most {MOST_SECONDS:g} s for the largest shape, growing by at most the power {MOST_GROWTH:g} of the "
        "number of instructions (! where it does not hold). torch: its own build and lowering, without proof or "
        "simulation, where it has the schedule; a shape that would take it more than "
        f"{parsed.torch_limit:g} s is left out.",
        style="dim",
        highlight=False,
    )
    return int(is_refused)


def section(
    ranks: Sequence[int] = (8, 32, 64),
    num_chunks: int = 2,
    torch_limit: float = 15.0,
    track: Callable[[Sequence[str]], Iterable[str]] = iter,
) -> Section:
    """The same for the report: every schedule that serves these shapes."""
    rows = []
    for name in track(names()):
        with suppress(ScheduleError):
            cells = _cells(name, measure(name, ranks, num_chunks, torch_limit))
            missing = [""] * (2 * len(ranks) + 3 - len(cells))
            rows.append((*map(str, cells), *missing))
    of_ranks = [f"P={num_ranks}, s" for num_ranks in ranks]
    return Section(
        name="schedules",
        title=f"create + verify + simulate, CPU seconds; M = 4P, V = {num_chunks} where one can choose",
        columns=("schedule", "instructions", *of_ranks, "growth", *(f"torch, {heading}" for heading in of_ranks)),
        rows=tuple(rows),
        note=f"Bar: at most {MOST_SECONDS:g} s for the largest shape, growing by at most the power {MOST_GROWTH:g} of "
        "the number of instructions. torch: its own build and lowering, without proof or simulation.",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stagewright.bench.schedules", description=__doc__)
    parser.add_argument("schedules", nargs="*", metavar="SCHEDULE", help="which to measure (default all)")
    parser.add_argument("--ranks", type=count, nargs="+", default=[8, 32, 64], metavar="P", help="default 8 32 64")
    parser.add_argument("--chunks", type=count, default=2, metavar="V", help="stages a rank (default 2)")
    parser.add_argument(
        "--torch-limit", type=float, default=15.0, metavar="S", help="seconds for torch's part, 0 for none (default 15)"
    )
    return parser


def measure(name: str, ranks: Sequence[int], num_chunks: int, torch_limit: float = 0.0) -> list[Measurement]:
    """Measure one schedule at rising numbers of ranks, with four microbatches a rank.

    Raises:
        ScheduleError: it does not serve one of these shapes.
    """
    measurements: list[Measurement] = []
    for num_ranks in ranks:
        num_instructions, seconds = _fastest(run, name, num_ranks, num_chunks, 4 * num_ranks)
        torch_seconds = None
        if name in TORCH_NAMES and _expected(measurements, num_ranks) < torch_limit:
            _, torch_seconds = _fastest(build_and_lower, name, num_ranks, num_chunks, 4 * num_ranks)
        measurements.append(Measurement(num_ranks, num_instructions, seconds, torch_seconds))
    return measurements


def run(name: str, num_ranks: int, num_chunks: int, num_microbatches: int) -> int:
    """Create, verify and simulate a schedule, as one does to look at it; returns its number of instructions."""
    takes_chunks = any(field.name == "num_chunks" for field in fields(find(name)))
    options = {"num_chunks": num_chunks} if takes_chunks else {}
    schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    program = schedule.program()  # verified
    timeline = simulate(program)
    assert timeline.makespan > 0
    assert max(timeline.peak_stash) > 0
    return sum(map(len, program.streams))


def growth(measurements: Sequence[Measurement]) -> float:
    """The power of the number of instructions by which the time grows: the slope through all shapes, in logarithms."""
    sizes = [log(measurement.num_instructions) for measurement in measurements]
    return linear_regression(sizes, [log(measurement.seconds) for measurement in measurements]).slope


def _fastest(work: Callable[[str, int, int, int], int], *shape: Any) -> tuple[int, float]:
    """What a function returns, and the fastest of some calls."""
    result, runs = 0, list[float]()
    gc.collect()
    while sum(runs) < _LONG_ENOUGH and len(runs) < _OFTEN_ENOUGH:
        start = process_time()
        result = work(*shape)
        runs.append(process_time() - start)
    return result, min(runs)


def _expected(measurements: Sequence[Measurement], num_ranks: int) -> float:
    """What torch will take, going by the cube of the ranks; at once where it was left out before."""
    if not measurements:
        return 0.0
    last = measurements[-1]
    return inf if last.torch_seconds is None else last.torch_seconds * (num_ranks / last.num_ranks) ** 3


def table_of(ranks: Sequence[int]) -> Table:
    """The empty table."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    table.add_column("instructions", justify="right")
    for num_ranks in ranks:
        table.add_column(f"P={num_ranks}", justify="right")
    table.add_column("growth", justify="right")
    for num_ranks in ranks:
        table.add_column(f"torch P={num_ranks}", justify="right")
    return table


def _cells(name: str, measurements: Sequence[Measurement]) -> list[str | Text]:
    slope = growth(measurements) if len(measurements) > 1 else 0.0
    *smaller, largest = (_seconds(measurement.seconds) for measurement in measurements)
    return [
        name,
        f"{measurements[-1].num_instructions:,}",
        *smaller,
        _barred(largest, measurements[-1].seconds <= MOST_SECONDS),
        _barred(f"{slope:.2f}" if slope else "", slope <= MOST_GROWTH),
        *("" if row.torch_seconds is None else _seconds(row.torch_seconds) for row in measurements),
    ]


def _barred(text: str, holds: bool) -> Text:
    return Text(text, style="bold") if holds else Text(f"{text} !", style="bold red")


def _seconds(seconds: float) -> str:
    return f"{seconds:.4f}" if seconds < 0.1 else f"{seconds:.2f}"


if __name__ == "__main__":
    sys.exit(main())
