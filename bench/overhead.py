"""What the engine itself costs: CPU and wall time per instruction on stages that compute almost nothing, against peers.

`python -m stagewright.bench.overhead`. Every schedule that torch has too runs by turns with it on like modules, in
the same processes; gpipe also with a loop written by hand. On a single rank a pipeline is held against a plain loop.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Final

import torch
from rich.console import Console
from torch import Tensor, nn

from stagewright.bench.paired import Ratio, Round, Turn, take_turns, together
from stagewright.bench.peers import TORCH_SCHEDULES, GPipeLoop, TorchPeer, make_group, squared_error
from stagewright.bench.report import Section, marked, print_section
from stagewright.bench.stages import WorkStage
from stagewright.cli.values import count
from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.schedules import Program, create

# The most of torch's CPU time that a schedule may take.
BARS: Final[Mapping[str, float]] = MappingProxyType({"gpipe": 0.75, "1f1b": 0.75, "interleaved": 0.5, "zbv": 0.5})
# The most of a hand-written GPipe loop's, and of a plain loop's wall time on one rank.
MOST_OF_HAND: Final = 1.0
MOST_OF_PLAIN: Final = 1.03

HIDDEN: Final = 64
ROWS: Final = 4  # of a microbatch
NUM_RANKS: Final = 2
NUM_MICROBATCHES: Final = 8


@dataclass(frozen=True)
class Outcome:
    """What one schedule took.

    Args:
        schedule: its name.
        num_instructions: of all ranks in a step, computations and messages; the same for all ways.
        num_steps: of one round.
        rounds: by way: ours, torch, and by hand where there is such a loop.
    """

    schedule: str
    num_instructions: int
    num_steps: int
    rounds: Mapping[str, Sequence[Round]]

    def cpu(self, way: str) -> float:
        """Seconds of CPU per instruction, the median of the rounds."""
        return median(turn.cpu for turn in self.rounds[way]) / self.num_steps / self.num_instructions

    def wall(self, way: str) -> float:
        """Seconds of a step per instruction of one rank, the median of the rounds."""
        seconds = median(turn.wall for turn in self.rounds[way]) / self.num_steps
        return seconds / (self.num_instructions / NUM_RANKS)

    def cpu_ratio(self, other: str) -> Ratio:
        """Our CPU time as a part of another way's."""
        return Ratio.of([turn.cpu for turn in self.rounds["ours"]], [turn.cpu for turn in self.rounds[other]])

    def wall_ratio(self, other: str) -> Ratio:
        """Our wall time as a part of another way's."""
        return Ratio.of([turn.wall for turn in self.rounds["ours"]], [turn.wall for turn in self.rounds[other]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; the exit code is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m stagewright.bench.overhead", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[*TORCH_SCHEDULES, "plain"], help="of these alone")
    parser.add_argument("--rounds", type=count, default=20, metavar="N", help="turns of each way (default 20)")
    parser.add_argument("--steps", type=count, default=20, metavar="N", help="of each turn (default 20)")
    parsed = parser.parse_args(arguments)
    section = measure(parsed.only, parsed.rounds, parsed.steps)
    print_section(section, Console())
    return int(section.misses > 0)


def measure(
    only: Sequence[str] | None = None,
    num_rounds: int = 20,
    num_steps: int = 20,
    track: Callable[[Sequence[str]], Iterable[str]] = iter,
) -> Section:
    """Measure all schedules that torch has, or those named, and ``plain``: one rank against a plain loop."""
    names = [name for name in TORCH_SCHEDULES if not only or name in only]
    outcomes = [outcome_of(name, num_rounds, num_steps) for name in track(names)]
    plain = None
    if not only or "plain" in only:
        plain = together(launch_local(_plain_rank, 1, args=(num_rounds,)))
    return section_of(outcomes, plain)


def outcome_of(name: str, num_rounds: int, num_steps: int) -> Outcome:
    """Measure one schedule."""
    of_ranks = launch_local(_rank, NUM_RANKS, args=(name, num_rounds, num_steps))
    program = create(name, num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES).program()
    return Outcome(name, num_instructions(program), num_steps, together(of_ranks))


def num_instructions(program: Program) -> int:
    """Computations and messages of all ranks."""
    return sum(map(len, program.streams))


def _rank(context: RankContext, name: str, num_rounds: int, num_steps: int) -> dict[str, list[Turn]]:
    """One rank: what every way took."""
    torch.set_num_threads(1)
    torch.manual_seed(context.rank)
    schedule = create(name, num_ranks=context.num_ranks, num_microbatches=NUM_MICROBATCHES)
    x, y = torch.randn(2, ROWS * NUM_MICROBATCHES, HIDDEN)
    group = make_group()
    stages = schedule.placement.stages_of(context.rank)
    modules = {stage: tiny_stage(stage) for stage in stages}
    pipe = pipeline_of(context, name, copy.deepcopy(modules))
    peer = TorchPeer(
        name, copy.deepcopy(modules), schedule.placement.num_stages, NUM_MICROBATCHES, squared_error, group
    )
    ways: dict[str, Callable[[], object]] = {"ours": partial(pipe.train_step, x, y), "torch": partial(peer.step, x, y)}
    if name == "gpipe":
        loop = GPipeLoop(context, copy.deepcopy(modules[context.rank]), NUM_MICROBATCHES, squared_error, group)
        ways["by hand"] = partial(loop.step, x, y)
    return take_turns(context, ways, num_rounds, num_steps, num_dropped=10)


def tiny_stage(stage: int) -> nn.Module:
    """A stage that computes almost nothing."""
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU())


def pipeline_of(context: RankContext, schedule: str, modules: dict[int, nn.Module]) -> Pipeline:
    """Ours."""
    return Pipeline(
        modules,
        schedule=schedule,
        num_microbatches=NUM_MICROBATCHES,
        loss_fn=squared_error,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        transport=context.transport,
    )


def _plain_rank(context: RankContext, num_rounds: int) -> dict[str, list[Turn]]:
    """The only rank: a pipeline of one stage, and a plain loop, on a stage of some milliseconds."""
    torch.set_num_threads(1)
    module = WorkStage(num_layers=8, width=512)
    x, y = torch.randn(2, 96 * NUM_MICROBATCHES, 512)
    pipe = pipeline_of(context, "1f1b", {0: copy.deepcopy(module)})
    loop = PlainLoop(module)
    ways: dict[str, Callable[[], object]] = {"ours": partial(pipe.train_step, x, y), "plain": partial(loop.step, x, y)}
    return take_turns(context, ways, num_rounds)


class PlainLoop:
    """What one writes without any pipeline: a module, its microbatches one after the other."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step(self, x: Tensor, y: Tensor) -> None:
        """One batch."""
        for rows, targets in zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES)):
            loss = squared_error(self._module(rows), targets) / NUM_MICROBATCHES
            loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()


def section_of(outcomes: Sequence[Outcome], plain: Mapping[str, Sequence[Round]] | None) -> Section:
    """The table."""
    rows = [row for outcome in outcomes for row in _rows_of(outcome)]
    if plain is not None:
        ratio = Ratio.of([turn.wall for turn in plain["ours"]], [turn.wall for turn in plain["plain"]])
        walls = [f"{1e3 * median(turn.wall for turn in plain[way]):.2f} ms a step" for way in ("ours", "plain")]
        text = marked(str(ratio), ratio.median <= MOST_OF_PLAIN)
        rows.append(("1 rank", "a plain loop", "", "", "", *walls, text, f"{MOST_OF_PLAIN:g} wall"))
    return Section(
        name="overhead",
        title=f"what the engine costs an instruction: hidden {HIDDEN}, P={NUM_RANKS}, M={NUM_MICROBATCHES}",
        columns=(
            *("schedule", "against", "CPU, µs", "theirs", "ratio of CPU [95 %]"),
            *("wall, µs", "theirs", "ratio of wall [95 %]", "bar"),
        ),
        rows=tuple(rows),
        note="CPU time of all threads of both ranks per instruction, wall time per instruction of one rank; medians of "
        "turns that alternate in the same processes, ratios turn by turn. The optimizer's update is in all of them.",
    )


def _rows_of(outcome: Outcome) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for other in [way for way in outcome.rounds if way != "ours"]:
        bar = MOST_OF_HAND if other == "by hand" else BARS.get(outcome.schedule)
        ratio = outcome.cpu_ratio(other)
        rows.append(
            (
                outcome.schedule,
                other,
                f"{1e6 * outcome.cpu('ours'):.1f}",
                f"{1e6 * outcome.cpu(other):.1f}",
                marked(str(ratio), bar is None or ratio.median <= bar),
                f"{1e6 * outcome.wall('ours'):.1f}",
                f"{1e6 * outcome.wall(other):.1f}",
                str(outcome.wall_ratio(other)),
                "" if bar is None else f"{bar:g} CPU",
            )
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
