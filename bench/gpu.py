"""Everything for a GPU that one has for some minutes: what the engine costs its host, and schedules that share it.

`python -m stagewright.bench.gpu --out FILE.json`. In order of importance, until the time is up: on one rank a tiny
GPT, on which the host is slower than the GPU, and a large one, each beside a plain loop; what makes the host wait; then
schedules on several ranks that share the GPU, step time and peak memory. The file is written anew after each part.
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Final

import torch
from rich.console import Console

from stagewright.bench.gpu_device import device_of, machine_of
from stagewright.bench.gpu_parts import Kind, Part, parts_of, works_on
from stagewright.bench.gpu_ranks import beside_plain, shared, waits_of
from stagewright.bench.gpu_report import Found, Look, Outcome, sections_of
from stagewright.bench.gpu_work import Work
from stagewright.bench.report import print_section
from stagewright.cli.values import count, positive
from stagewright.engine import launch_local
from stagewright.schedules import names

MINUTES: Final = 8.0
NUM_RANKS: Final = 4
NUM_MICROBATCHES: Final = 8
OUT: Final = Path("build/bench/gpu.json")

# What a part takes before one of its kind was seen; after that, as long as the longest so far.
_FIRST_SECONDS: Final[Mapping[Kind, float]] = MappingProxyType({"alone": 30.0, "waits": 30.0, "shared": 45.0})
# The most that a part may take, for one that hangs must leave time for the others; and what starting its ranks may.
_MOST_SECONDS: Final = 120.0
_START_SECONDS: Final = 10.0


class Budget:
    """The time there is.

    Args:
        seconds: of it, from now on.
        clock: gives seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._longest = dict(_FIRST_SECONDS)
        self._seen: set[Kind] = set()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._end - self._clock()

    def allows(self, kind: Kind) -> bool:
        """Whether a part of a kind is done in time, by the longest one so far."""
        return self.left >= self._longest[kind] + _START_SECONDS

    @property
    def limit(self) -> float:
        """Seconds after which a part that begins now is ended, done or not."""
        return min(_MOST_SECONDS, self.left - _START_SECONDS)

    def spent(self, kind: Kind, seconds: float) -> None:
        """Note how long a part took."""
        self._longest[kind] = max(seconds, self._longest[kind]) if kind in self._seen else seconds
        self._seen.add(kind)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables and write them; the exit code is 1 where a bar is missed or a part has failed."""
    parsed = _parser().parse_args(arguments)
    console = Console()
    if parsed.device == "cuda" and not torch.cuda.is_available():
        console.print(
            f"skipped: the bench of GPUs needs one, and torch {torch.__version__} finds none; "
            "--device cpu tries all of it on tiny GPTs",
            highlight=False,
        )
        return 0
    logging.getLogger("torch").setLevel(logging.ERROR)
    works = works_on(parsed.device, parsed.microbatches)
    parts = parts_of(parsed.ranks, parsed.microbatches, parsed.only)
    bench = Bench(works, Budget(60 * parsed.minutes), parsed.out, console)
    bench.measure(parts)
    for section in bench.sections:
        print_section(section, console)
    console.print(f"written: {parsed.out}", style="dim", highlight=False, soft_wrap=True)
    return int(bool(bench.found.failures) or any(section.misses for section in bench.sections))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stagewright.bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="for what is found (default %(default)s)")
    parser.add_argument("--minutes", type=positive, default=MINUTES, metavar="N", help="for all (default %(default)g)")
    parser.add_argument("--ranks", type=count, default=NUM_RANKS, metavar="P", help="on one GPU (default %(default)s)")
    parser.add_argument("--microbatches", type=count, default=NUM_MICROBATCHES, metavar="M", help="default %(default)s")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=names(),
        help="of these alone, on shared GPUs (default all)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it, on tiny GPTs")
    return parser


class Bench:
    """Measures part after part while there is time, and writes what it has after each.

    Args:
        works: the GPTs, by name.
        budget: the time there is.
        path: of the file.
        console: to which it says what was done.
    """

    def __init__(self, works: Mapping[str, Work], budget: Budget, path: Path, console: Console) -> None:
        self.found = Found()
        self._works = works
        self._budget = budget
        self._path = path
        self._console = console
        self._device = device_of(works["large"].device)
        self._machine = machine_of(self._device)
        self.sections = sections_of(self.found, works, str(self._machine["device"]))

    def measure(self, parts: Sequence[Part]) -> None:
        """All that there is time for."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for part in parts:
            if self._budget.allows(part.kind):
                self._measure(part)
            else:
                self.found.left.append(str(part))
            self._write()

    def _measure(self, part: Part) -> None:
        start = perf_counter()
        try:
            self._run(part)
        except Exception as error:
            self.found.failures[str(part)] = f"{type(error).__name__}: {error}".splitlines()[0]
        seconds = perf_counter() - start
        self._budget.spent(part.kind, seconds)
        said = self.found.failures.get(str(part), "done")
        self._console.print(f"{part}: {said} in {seconds:.0f} s, {self._budget.left:.0f} s left", highlight=False)

    def _run(self, part: Part) -> None:
        """Measure a part in its processes."""
        work, schedule, num_ranks = self._works[part.model], part.schedule, part.schedule.num_ranks
        arguments = (work, schedule, self._budget.limit)
        match part.kind:
            case "alone":
                self.found.alone += launch_local(beside_plain, 1, args=(part.model, *arguments))
            case "waits":
                waits = launch_local(waits_of, num_ranks, args=arguments)
                self.found.looks.append(Look(schedule, waits))
            case "shared":
                of_ranks = launch_local(shared, num_ranks, args=arguments)
                self.found.shared.append(Outcome(schedule, work.num_steps, of_ranks))

    def _write(self) -> None:
        self.sections = sections_of(self.found, self._works, str(self._machine["device"]))
        found = {
            "machine": self._machine,
            "sections": [asdict(section) for section in self.sections],
            "found": self._raw(),
        }
        self._path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def _raw(self) -> dict[str, object]:
        """Every number that was noted."""
        found = self.found
        return {
            "alone": [asdict(alone) for alone in found.alone],
            "waits": [
                {"schedule": look.schedule.name, "of_ranks": [asdict(waits) for waits in look.of_ranks]}
                for look in found.looks
            ],
            "shared": [
                {
                    "schedule": outcome.schedule.name,
                    "steps": outcome.steps,
                    "predicted": outcome.predicted,
                    "of_ranks": [asdict(of_rank) for of_rank in outcome.of_ranks],
                }
                for outcome in found.shared
            ],
            "failures": found.failures,
            "left": found.left,
        }


if __name__ == "__main__":
    sys.exit(main())
