"""Whether a run stashes what was predicted: entries and bytes by schedule, receive buffers, and many steps in a row.

`python -m stagewright.bench.memory`. Between all instructions of a step it is looked at how many stash entries a rank
holds, how many bytes are allocated, and how many receives are posted. The prediction is the simulation's, with the
bytes that F, I and W of a single microbatch take or give back on a stage outside any pipeline.
"""

import ctypes
import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from stagewright.bench.bubble import in_some, schedules_of
from stagewright.bench.command import run_bench
from stagewright.bench.peers import squared_error
from stagewright.bench.report import Section, marked
from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.engine.channels import channels_of
from stagewright.engine.executor import Action, Executor
from stagewright.engine.stages.randomness import Seeds
from stagewright.engine.stages.stage import Stage
from stagewright.engine.value import pack
from stagewright.schedules import Costs, Program, Schedule, create, simulate
from stagewright.schedules.instructions import WeightGradient

# How far bytes may be from the prediction.
MOST_ERROR: Final = 0.02
NUM_STEPS: Final = 200
# By how many bytes what a process has allocated may grow in so many steps once buffers have their sizes.
MOST_GROWTH: Final = 2**16

_ROWS, _WIDTH, _REPEATS = 256, 2, 256  # of a microbatch; what is kept is large against what crosses
_NUM_DROPPED: Final = 20


class KeepingStage(nn.Module):
    """Keeps much for its backward and passes little on: some elementwise maps, and a linear one that is small."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))  # so that the first stage, too, goes backward through all of it
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to the same."""
        wide = (x * self.scale).repeat(1, _REPEATS).sin().tanh().exp()
        mapped: Tensor = self.linear(wide.view(-1, _WIDTH))
        return mapped.view(-1, _REPEATS, _WIDTH).mean(1)


@dataclass(frozen=True)
class Seen:
    """The most that one rank held after any instruction.

    Args:
        entries: of its stash.
        num_bytes: of its tensors, beyond those that it had before the step.
        receives: posted and not yet consumed.
        allowed: how many of these its channels may have.
    """

    entries: int
    num_bytes: int
    receives: int
    allowed: int


@dataclass(frozen=True)
class Outcome:
    """One schedule: what was predicted, and what each rank has seen."""

    schedule: Schedule
    entries: Sequence[int]
    num_bytes: Sequence[float]
    seen: Sequence[Seen]

    @property
    def error(self) -> float:
        """Of the bytes, on the rank where it is largest."""
        errors = [seen.num_bytes / predicted - 1 for seen, predicted in zip(self.seen, self.num_bytes)]
        return max(errors, key=abs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; the exit code is 1 where a bar is missed."""
    return run_bench("memory", measure, arguments, description=__doc__, num_steps=NUM_STEPS, steps="in a row")


def measure(
    only: Sequence[str] | None = None,
    num_steps: int = NUM_STEPS,
    track: Callable[[Sequence[Sequence[Schedule]]], Iterable[Sequence[Schedule]]] = iter,
) -> Section:
    """Measure every synchronous schedule that the engine runs in the shape of the bubbles, or those named."""
    schedules = [schedule for schedule in schedules_of(only) if schedule.synchronous]
    costs = {splits: costs_of_one(splits) for splits in (False, True)}
    outcomes = [outcome for some in track(in_some(schedules)) for outcome in outcomes_of(some, costs)]
    return section_of(outcomes, growth_of(num_steps) if num_steps else None, num_steps)


def costs_of_one(splits: bool) -> Costs:
    """The bytes that a microbatch keeps on a stage: what I gives back, and what W does."""
    stage = Stage(1, KeepingStage(1), Seeds(0, torch.device("cpu")), splits_backward=splits)
    x, dy = torch.randn(2, _ROWS, _WIDTH)

    def forward() -> None:
        packed = pack(x.detach().requires_grad_(), "the bench")
        stage.hand_on(0, stage.forward(0, (0, 0), packed, {}, 0))

    def input_gradient() -> None:
        stage.input_gradient(0, [dy])

    for action in (forward, input_gradient, partial(stage.weight_gradient, 0)):
        action()  # once before, for the gradients of the weights come into being
    levels = levels_of([forward, input_gradient, partial(stage.weight_gradient, 0)])
    return Costs(activation_bytes=levels[0] - levels[1], weight_bytes=levels[1] - levels[2])


def levels_of(actions: Sequence[Action], look: Action | None = None) -> list[int]:
    """The bytes that are allocated after each action, beyond those from before the first."""
    gc.collect()
    allocator, levels = Allocator(), []
    before = allocator.num_bytes
    for action in actions:
        action()
        if look is not None:
            look()
        levels.append(allocator.num_bytes - before)
    return levels


class Allocator:
    """What glibc has handed out to the main thread of this process, whose tensors are among it."""

    def __init__(self) -> None:
        self._mallinfo = ctypes.CDLL(None).mallinfo2
        self._mallinfo.restype = _MallInfo

    @property
    def num_bytes(self) -> int:
        """In use now, in its arena or mapped on their own."""
        info = self._mallinfo()
        return int(info.uordblks + info.hblkhd)


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of <malloc.h>."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def outcomes_of(schedules: Sequence[Schedule], costs: dict[bool, Costs]) -> list[Outcome]:
    """Measure some schedules in the same processes."""
    outcomes = []
    for schedule, seen in zip(schedules, zip(*launch_local(_rank, schedules[0].num_ranks, args=(schedules,)))):
        program = schedule.program()
        timeline = simulate(program, costs[splits_backward(program)])
        outcomes.append(Outcome(schedule, timeline.peak_stash, timeline.peak_bytes, seen))
    return outcomes


def splits_backward(program: Program) -> bool:
    """Whether a program has W at all."""
    return any(isinstance(instruction, WeightGradient) for stream in program.streams for instruction in stream)


class _Watched:
    """Looks at a pipeline's stash and its posted receives after every instruction."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self.entries = self.receives = 0

    def look(self) -> None:
        """Note what is held now."""
        stages, lines = self._pipe._stages.values(), self._pipe._transport._lines.values()  # type: ignore[attr-defined]
        held = sum(len(stage.stash) + len(stage._pending) for stage in stages)
        posted = sum(line.num_awaited for line in lines if line.channel.kind in ("activation", "gradient"))
        self.entries, self.receives = max(self.entries, held), max(self.receives, posted)


def _rank(context: RankContext, schedules: Sequence[Schedule]) -> list[Seen]:
    """One rank: the most that it holds in a step of each schedule."""
    return [_seen(context, schedule) for schedule in schedules]


def _seen(context: RankContext, schedule: Schedule) -> Seen:
    pipe = _pipeline(context, schedule)
    x, y = torch.randn(2, schedule.num_microbatches * _ROWS, _WIDTH)
    for _ in range(2):
        pipe.forward_backward(x, y)
    watched = _Watched(pipe)
    executor = list(pipe._training._executors.values())[-1]
    levels: list[int] = []
    actions = [half for action in executor._actions for half in halves_of(action, executor)]
    executor._actions = (partial(_run_watched, actions, watched, levels),)
    executor._stream = executor._stream[:1]
    pipe.forward_backward(x, y)
    channels = channels_of(executor.program).values()
    allowed = sum(channel.depth for channel in channels if channel.destination == context.rank)
    return Seen(watched.entries, max(levels), watched.receives, allowed)


def halves_of(action: Action, executor: Executor) -> list[Action]:
    """A fused pair as its forward and its backward, since it holds most between the two; any other action as it is."""
    if isinstance(action, partial) and action.func == executor._overlap:
        return list(action.args)
    return [action]


def _run_watched(actions: Sequence[Action], watched: _Watched, levels: list[int]) -> None:
    """All instructions of a step."""
    levels += levels_of(actions, watched.look)


def _pipeline(context: RankContext, schedule: Schedule) -> Pipeline:
    torch.set_num_threads(1)
    return Pipeline(
        KeepingStage,
        schedule=schedule,
        loss_fn=squared_error,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        transport=context.transport,
    )


def growth_of(num_steps: int) -> int:
    """By how many bytes what a rank has allocated grows, at most, in so many steps of 1f1b."""
    grown: list[int] = launch_local(_grow, 2, args=(num_steps,))
    return max(grown)


def _grow(context: RankContext, num_steps: int) -> int:
    pipe = _pipeline(context, create("1f1b", num_ranks=2, num_microbatches=8))
    x, y = torch.randn(2, 8 * _ROWS, _WIDTH)
    for _ in range(_NUM_DROPPED):
        pipe.train_step(x, y)
    gc.collect()
    allocator = Allocator()
    before = allocator.num_bytes
    for _ in range(num_steps):
        pipe.train_step(x, y)
    gc.collect()
    return allocator.num_bytes - before


def section_of(outcomes: Sequence[Outcome], growth: int | None, num_steps: int = NUM_STEPS) -> Section:
    """The table; with by how much memory has grown in so many steps, where that was measured."""
    rows = tuple(map(_row_of, outcomes))
    grown = "not measured" if growth is None else marked(f"{growth / 2**10:+.1f} KiB", growth <= MOST_GROWTH)
    return Section(
        name="memory",
        title="the most a rank stashes, by what was predicted: P=4, M=8",
        columns=("schedule", "entries", "predicted", "MiB", "predicted", "error of bytes", "receives", "at most"),
        rows=(*rows, ("many steps in a row", "", "", grown, "", "", "", "")),
        note="Entries, bytes and receives posted after any instruction of a step; entries rank by rank, bytes and "
        f"receives of the rank that has most. Bar: equal entries, bytes within {MOST_ERROR:.0%} on every rank, no more "
        "receives than the channels' depths. The last line: by how much what a rank has allocated grows in "
        f"{num_steps} steps of 1f1b (bar: {MOST_GROWTH / 2**10:g} KiB).",
    )


def _row_of(outcome: Outcome) -> tuple[str, ...]:
    entries = [seen.entries for seen in outcome.seen]
    fullest = max(outcome.seen, key=lambda seen: seen.receives)
    bounded = all(seen.receives <= seen.allowed for seen in outcome.seen)
    return (
        outcome.schedule.name,
        marked(" ".join(map(str, entries)), entries == list(outcome.entries)),
        " ".join(map(str, outcome.entries)),
        f"{max(seen.num_bytes for seen in outcome.seen) / 2**20:.2f}",
        f"{max(outcome.num_bytes) / 2**20:.2f}",
        marked(f"{outcome.error:+.1%}", abs(outcome.error) <= MOST_ERROR),
        marked(str(fullest.receives), bounded),
        str(fullest.allowed),
    )


if __name__ == "__main__":
    sys.exit(main())
