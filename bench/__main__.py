"""Run the benches named, or those of the report, and write it: JSON, Markdown and pictures."""

import argparse
import gc
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stagewright.bench import (
    asynchronous,
    bubble,
    gpu,
    memory,
    overhead,
    prediction,
    schedules,
    split_backward,
    staleness,
    throughput,
)
from stagewright.bench.report import Section, print_section, write_report

Track: TypeAlias = Callable[[Sequence[Any]], Iterable[Any]]

# What the report is made of; each passes what it measures through a track.
SECTIONS: Final[Mapping[str, Callable[..., Section]]] = MappingProxyType(
    {
        "bubble": bubble.measure,
        "overhead": overhead.measure,
        "throughput": throughput.measure,
        "memory": memory.measure,
        "schedules": schedules.section,
    }
)
# What runs only where it is named, and prints a table of its own.
OTHERS: Final[Mapping[str, Callable[[Sequence[str]], int]]] = MappingProxyType(
    {
        "prediction": prediction.main,
        "split_backward": split_backward.main,
        "asynchronous": asynchronous.main,
        "staleness": staleness.main,
        "gpu": gpu.main,
    }
)
FOLDER: Final = Path("build/bench")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run benches with their defaults; the exit code is 0 also where a bar is missed, which the tables mark."""
    parser = argparse.ArgumentParser(
        prog="python -m stagewright.bench",
        description="Run benches with their defaults; python -m stagewright.bench.NAME takes more arguments.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(SECTIONS)} (default all of these), {', '.join(OTHERS)}",
    )
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help=f"for the report (default {FOLDER})")
    parsed = parser.parse_args(arguments)
    unknown = [name for name in parsed.names if name not in SECTIONS and name not in OTHERS]
    if unknown:
        parser.error(f"there is no bench {unknown[0]!r}: there are {', '.join([*SECTIONS, *OTHERS])}")
    try:
        parsed.out.mkdir(parents=True, exist_ok=True)  # rather now than after minutes
    except OSError as error:
        parser.error(f"cannot write a report to {parsed.out}: {error.strerror}")
    names = parsed.names or list(SECTIONS)
    run([name for name in names if name in SECTIONS], parsed.out, Console())
    codes = [OTHERS[name]([]) for name in names if name in OTHERS]
    return next((code for code in codes if code), 0)


def run(names: Sequence[str], folder: Path, console: Console) -> list[Section]:
    """Measure these sections, print each as it is done, and write the report."""
    gc.freeze()  # what the imports left behind is none of what is measured
    logging.getLogger("torch").setLevel(logging.ERROR)
    sections: list[Section] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for name in names:
            sections.append(SECTIONS[name](track=partial(_tracked, progress, name)))
            print_section(sections[-1], console)
    if sections:
        paths = write_report(sections, folder)
        console.print(f"written: {', '.join(map(str, paths))}", style="dim", highlight=False, soft_wrap=True)
    return sections


def _tracked(progress: Progress, name: str, parts: Sequence[Any]) -> Iterable[Any]:
    return progress.track(parts, description=name)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell has it; nothing was written
