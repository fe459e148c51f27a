"""Paired: several ways to do the same work, timed by turns in the same processes, so that all see the same machine."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from stagewright.bench.prediction import interval
from stagewright.engine import RankContext


@dataclass(frozen=True, slots=True)
class Turn:
    """What one rank noted of some steps.

    Args:
        start, end: by the clock of the machine.
        cpu: seconds of all its threads.
    """

    start: float
    end: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Round:
    """The same steps on all ranks.

    Args:
        wall: seconds from the first rank's start to the last one's end.
        cpu: seconds of all threads of all ranks.
    """

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as much one way takes as another: the median over rounds, and where that lies with 95 %."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> "Ratio":
        """The ratios round by round."""
        ratios = [mine / other for mine, other in zip(ours, theirs)]
        return cls(median(ratios), *interval(ratios))

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f} .. {self.high:.3f}]"


def take_turns(
    context: RankContext,
    ways: Mapping[str, Callable[[], object]],
    num_rounds: int,
    num_steps: int = 1,
    num_dropped: int = 3,
) -> dict[str, list[Turn]]:
    """Time every way once a round, forth in one round and back in the next; all ranks begin each turn together.

    Args:
        context: this rank.
        ways: name -> one step.
        num_rounds: of them.
        num_steps: of one turn.
        num_dropped: steps of each way before the first round, in which buffers are made.
    """
    for step in ways.values():
        for _ in range(num_dropped):
            step()
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    for index in range(num_rounds):
        for name in list(ways)[:: 1 if index % 2 == 0 else -1]:
            turns[name].append(_timed(context, ways[name], num_steps))
    return turns


def _timed(context: RankContext, step: Callable[[], object], num_steps: int) -> Turn:
    context.transport.gather(b"")
    cpu, start = time.process_time(), time.perf_counter()
    for _ in range(num_steps):
        step()
    return Turn(start, time.perf_counter(), time.process_time() - cpu)


def together(of_ranks: Sequence[Mapping[str, Sequence[Turn]]]) -> dict[str, list[Round]]:
    """What all ranks have noted, round by round."""
    return {name: [_round(turns) for turns in zip(*(of_rank[name] for of_rank in of_ranks))] for name in of_ranks[0]}


def _round(turns: Sequence[Turn]) -> Round:
    wall = max(turn.end for turn in turns) - min(turn.start for turn in turns)
    return Round(wall, sum(turn.cpu for turn in turns))
