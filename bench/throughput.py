"""How fast a step is on real transformer blocks, against torch.distributed.pipelining, by turns in the same processes.

`python -m stagewright.bench.throughput`. Every schedule that both have; a rank's share of the model takes about five
milliseconds a forward. The ideal is the simulation of the program with the costs that these very steps were
calibrated to, and messages that take no time.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Final

import torch
from torch import nn

from stagewright.bench.command import run_bench
from stagewright.bench.paired import Ratio, Round, Turn, take_turns, together
from stagewright.bench.peers import TORCH_SCHEDULES, TorchPeer, make_group, squared_error
from stagewright.bench.report import Section, marked
from stagewright.bench.split_backward import Blocks
from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.models import GPTConfig
from stagewright.schedules import create, simulate

# The most of torch's time that a step may take; or this part of torch's distance to the ideal is closed.
MOST_OF_TORCH: Final = 0.97
LEAST_CLOSED: Final = 0.5
NUM_RANKS: Final = 2
NUM_MICROBATCHES: Final = 8
NUM_STEPS: Final = 40  # pairs of them

_LAYERS: Final = 2  # of a rank
_SEQUENCE, _HIDDEN, _ROWS = 64, 128, 4  # rows of a microbatch


@dataclass(frozen=True)
class Outcome:
    """What one schedule took, in seconds.

    Args:
        schedule: its name.
        ideal: a step without messages.
        ours, torch: each step, by turns.
    """

    schedule: str
    ideal: float
    ours: Sequence[float]
    torch: Sequence[float]

    @property
    def closed(self) -> float:
        """Which part of torch's distance to the ideal is closed, by the medians; nothing where there is none."""
        distance = median(self.torch) - self.ideal
        return (median(self.torch) - median(self.ours)) / distance if distance > 0 else 0.0

    @property
    def holds(self) -> bool:
        """Whether either bar is met."""
        return Ratio.of(self.ours, self.torch).median <= MOST_OF_TORCH or self.closed >= LEAST_CLOSED


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; the exit code is 1 where a bar is missed."""
    return run_bench(
        "throughput",
        measure,
        arguments,
        description=__doc__,
        num_steps=NUM_STEPS,
        steps="pairs of steps",
        choices=list(TORCH_SCHEDULES),
    )


def measure(
    only: Sequence[str] | None = None,
    num_steps: int = NUM_STEPS,
    track: Callable[[Sequence[str]], Iterable[str]] = iter,
) -> Section:
    """Measure every schedule that torch has too, or those named."""
    names = [name for name in TORCH_SCHEDULES if not only or name in only]
    return section_of([outcome_of(name, num_steps) for name in track(names)])


def outcome_of(name: str, num_steps: int) -> Outcome:
    """Measure one schedule."""
    of_ranks = launch_local(_rank, NUM_RANKS, args=(name, num_steps))
    rounds: Mapping[str, Sequence[Round]] = together([turns for turns, _ in of_ranks])
    ours, theirs = ([turn.wall for turn in rounds[way]] for way in ("ours", "torch"))
    return Outcome(name, of_ranks[0][1], ours, theirs)


def _rank(context: RankContext, name: str, num_steps: int) -> tuple[dict[str, list[Turn]], float]:
    """One rank: when each of its steps began and ended, and the ideal."""
    torch.set_num_threads(1)
    torch.manual_seed(context.rank)
    schedule = create(name, num_ranks=context.num_ranks, num_microbatches=NUM_MICROBATCHES)
    placement = schedule.placement
    modules = {stage: _blocks(placement.num_chunks) for stage in placement.stages_of(context.rank)}
    x, y = torch.randn(2, NUM_MICROBATCHES * _ROWS, _SEQUENCE, _HIDDEN)
    pipe = Pipeline(
        copy.deepcopy(modules),
        schedule=schedule,
        loss_fn=squared_error,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        transport=context.transport,
    )
    peer = TorchPeer(name, modules, placement.num_stages, NUM_MICROBATCHES, squared_error, make_group())
    ways: dict[str, Callable[[], object]] = {"ours": partial(pipe.train_step, x, y), "torch": partial(peer.step, x, y)}
    turns = take_turns(context, ways, num_steps)
    costs = replace(pipe.calibrate(), send=0.0, message_bytes=0.0)
    return turns, simulate(pipe.program, costs).makespan


def _blocks(num_chunks: int) -> nn.Module:
    """A chunk of a rank's layers."""
    return Blocks(
        GPTConfig(num_layers=max(_LAYERS // num_chunks, 1), hidden_size=_HIDDEN, num_heads=4, sequence_length=_SEQUENCE)
    )


def section_of(outcomes: Sequence[Outcome]) -> Section:
    """The table, and the bars of each step."""
    return Section(
        name="throughput",
        title=f"steps on transformer blocks: P={NUM_RANKS}, M={NUM_MICROBATCHES}, hidden {_HIDDEN}, {_LAYERS} layers a "
        "rank",
        columns=("schedule", "ideal, ms", "ours, ms", "torch, ms", "ours / torch [95 %]", "closed of torch's distance"),
        rows=tuple(map(_row_of, outcomes)),
        note=f"Medians of {min(len(outcome.ours) for outcome in outcomes)} pairs of steps that alternate in the same "
        f"processes. Bar: at most {MOST_OF_TORCH:g} of torch's time, or at least {LEAST_CLOSED:.0%} of torch's "
        "distance to the ideal closed.",
        bars={
            outcome.schedule: {
                "ideal": 1e3 * outcome.ideal,
                "ours": 1e3 * median(outcome.ours),
                "torch": 1e3 * median(outcome.torch),
            }
            for outcome in outcomes
        },
        unit=" ms",
    )


def _row_of(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.schedule,
        f"{1e3 * outcome.ideal:.1f}",
        f"{1e3 * median(outcome.ours):.1f}",
        f"{1e3 * median(outcome.torch):.1f}",
        marked(str(Ratio.of(outcome.ours, outcome.torch)), outcome.holds),
        f"{outcome.closed:.0%}",
    )


if __name__ == "__main__":
    sys.exit(main())
