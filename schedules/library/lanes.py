"""Lanes: a pipeline with split backward as list scheduling sees it, in integers.

A *lane* is one kind of instruction on one stage, ``3 * stage + kind``, with the kinds ``FORWARD``, ``INPUT`` and
``WEIGHT``. In every lane the microbatches follow each other in order. So an order is a list of lanes, and the
n-th time that a lane occurs in it means its microbatch n: on one stage, ``[0, 0, 1, 2, 1, 2]`` is
``0F0 0F1 0I0 0W0 0I1 0W1``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, TypeAlias

from stagewright.schedules.costs import Costs
from stagewright.schedules.instructions import Computation, Forward, InputGradient, WeightGradient

Lanes: TypeAlias = list[int]

FORWARD: Final = 0
INPUT: Final = 1
WEIGHT: Final = 2

_KINDS: Final = (Forward, InputGradient, WeightGradient)


@dataclass(frozen=True)
class Pipeline:
    """What there is to schedule.

    Args:
        rank_of: the rank that owns each stage.
        num_microbatches: microbatches of one batch.
        durations: what an instruction takes, one number a lane.
        hops: from a stage to the next one and back, one number a stage; nothing where both are on one rank.
        stashes: by how much an instruction changes what its rank stashes, one number a lane.
        capacities: the most that each rank may stash.
    """

    rank_of: tuple[int, ...]
    num_microbatches: int
    durations: tuple[float, ...]
    hops: tuple[float, ...]
    stashes: tuple[float, ...]
    capacities: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return len(self.rank_of)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        ranks = range(len(self.capacities))
        return tuple(tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank) for rank in ranks)

    @cached_property
    def followers(self) -> tuple[tuple[int, float], ...]:
        """For each lane, the lane whose microbatch it makes ready, or -1, and the time it takes to get there."""
        followers: list[tuple[int, float]] = []
        last = self.num_stages - 1
        for stage in range(self.num_stages):
            lane = 3 * stage
            followers.append((lane + 3, self._hop(stage)) if stage < last else (lane + INPUT, 0.0))
            followers.append((lane - 3 + INPUT, self._hop(stage - 1)) if stage else (-1, 0.0))
            followers.append((-1, 0.0))
        return tuple(followers)

    def _hop(self, stage: int) -> float:
        return 0.0 if self.rank_of[stage] == self.rank_of[stage + 1] else self.hops[stage]

    def evened(self, share: float) -> "Pipeline":
        """The same pipeline with that share of all differences between durations taken away, and of all hops."""
        mean = sum(self.durations) / len(self.durations)
        durations = tuple(duration + share * (mean - duration) for duration in self.durations)
        return replace(self, durations=durations, hops=tuple((1 - share) * hop for hop in self.hops))


def pipeline_of(
    rank_of: Sequence[int],
    num_microbatches: int,
    costs: Costs,
    capacities: Sequence[float],
    stashes: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Pipeline:
    """Read a pipeline off costs.

    Args:
        rank_of: the rank that owns each stage.
        num_microbatches: microbatches of one batch.
        costs: what the stages cost.
        capacities: the most that each rank may stash.
        stashes: what F stashes until I, and until W, one number a stage; left out, one entry until W.
    """
    stages = costs.of_stages(len(rank_of))
    until_input, until_weight = stashes or ([0.0] * len(rank_of), [1.0] * len(rank_of))
    durations: list[float] = []
    changes: list[float] = []
    for stage in range(len(rank_of)):
        durations += [stages.forward[stage], stages.input_gradient[stage], stages.weight_gradient[stage]]
        changes += [until_input[stage] + until_weight[stage], -until_input[stage], -until_weight[stage]]
    hops = tuple(send + transfer for send, transfer in zip(stages.send, stages.transfer))
    return Pipeline(tuple(rank_of), num_microbatches, tuple(durations), hops, tuple(changes), tuple(capacities))


def span_and_makespan(pipeline: Pipeline, orders: Sequence[Lanes]) -> tuple[float, float]:
    """Play orders through: the longest that any rank takes from its first start to its last end, and that all take."""
    durations, followers = pipeline.durations, pipeline.followers
    arrivals: list[list[float]] = [[] for _ in durations]
    arrivals[FORWARD] = [0.0] * pipeline.num_microbatches
    counts = [0] * len(durations)
    next_positions, clocks, starts = [0] * len(orders), [0.0] * len(orders), [0.0] * len(orders)
    waiting: dict[int, int] = {}  # from the lane that an arrival is awaited on to the rank that waits
    runnable = list(range(len(orders)))
    while runnable:
        rank = runnable.pop()
        order, clock = orders[rank], clocks[rank]
        for position in range(next_positions[rank], len(order)):
            lane = order[position]
            if lane % 3 != WEIGHT:
                count = counts[lane]
                if count == len(arrivals[lane]):
                    waiting[lane] = rank
                    next_positions[rank] = position
                    break
                counts[lane] = count + 1
                clock = max(clock, arrivals[lane][count])
            if position == 0:
                starts[rank] = clock
            clock += durations[lane]
            follower, hop = followers[lane]
            if follower >= 0:
                arrivals[follower].append(clock + hop)
                if follower in waiting:
                    runnable.append(waiting.pop(follower))
        clocks[rank] = clock
    return max(clock - start for clock, start in zip(clocks, starts)), max(clocks)


def computations(order: Lanes) -> list[Computation]:
    """An order of lanes as instructions: the n-th time that a lane occurs is its microbatch n."""
    counts = dict.fromkeys(order, 0)
    computations: list[Computation] = []
    for lane in order:
        stage, kind = divmod(lane, 3)
        computations.append(_KINDS[kind](stage, counts[lane]))
        counts[lane] += 1
    return computations
