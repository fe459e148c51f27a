"""List scheduling: whenever a rank is free, it takes the first instruction of its plan that can run.

A plan is the order in which a rank would compute if nothing ever came late and nothing ever came early. What
comes of it under real durations is found here by playing the pipeline through: an instruction that has not
arrived is overtaken by later ones, as far as the stash allows, and weight gradients, which nobody waits for,
fill the remaining gaps (the idea of Qi et al. 2024, section 3: "whenever a bubble is long enough, or memory
demands it").

Inside, an instruction is a *lane*, ``3 * stage + kind``, with the kinds ``FORWARD``, ``INPUT`` and ``WEIGHT``. In
every lane the microbatches follow each other in order, so a plan or an order is a list of lanes, and the n-th
time that a lane occurs it means microbatch n.

    plans = [[0, 0, 1, 2, 1, 2]]                       # one rank, one stage: F0 F1 I0 W0 I1 W1
    ListScheduler(pipeline, plans, early=…).orders()   # lists of lanes again, one a rank
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Flag, auto
from functools import cached_property
from heapq import heappop, heappush
from typing import Final, TypeAlias

Lanes: TypeAlias = list[int]

FORWARD: Final = 0
INPUT: Final = 1
WEIGHT: Final = 2

_NEVER: Final = 1 << 62
_TICKS: Final = (
    1_000_000  # that the longest instruction takes: times are whole numbers, so that equal ones compare equal
)


class Early(Flag):
    """Which instructions may overtake those of their rank's plan that have not arrived."""

    FORWARDS = auto()
    GRADIENTS = auto()


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
        """The same pipeline with that share of the differences between F, I and W of a stage taken away."""
        durations: list[float] = []
        for stage in range(self.num_stages):
            three = self.durations[3 * stage : 3 * stage + 3]
            mean = sum(three) / 3
            durations += [duration + share * (mean - duration) for duration in three]
        hops = tuple((1 - share) * hop for hop in self.hops)
        return replace(self, durations=tuple(durations), hops=hops)


class ListScheduler:
    """Plays a pipeline through, from planned orders to real ones.

    The stash stays within its bounds, and the ranks cannot come to wait for each other, by one rule: at any
    moment a rank could do what is left of its plan, in the order of the plan, within its capacity. Weight and
    input gradients may come early without breaking it; a forward comes early only if the rule still holds
    after it, and a weight gradient gives way to a forward only while there is room for both.

    Args:
        pipeline: what there is to do.
        plans: the planned order of each rank, a list of lanes. Together they must be an order that all ranks
            can follow without waiting in a circle, within all capacities.
        early: what may overtake.
    """

    def __init__(self, pipeline: Pipeline, plans: Sequence[Lanes], early: Early) -> None:
        scale = _TICKS / (max(pipeline.durations) or 1.0)
        self.durations = [round(duration * scale) for duration in pipeline.durations]
        self.followers = [(lane, round(hop * scale)) for lane, hop in pipeline.followers]
        self.pipeline = pipeline
        self.plans = plans
        self.capacities = [capacity * (1 + 1e-9) for capacity in pipeline.capacities]
        num_lanes = len(pipeline.durations)
        self.counts = [0] * num_lanes  # microbatches done
        self.arrivals: list[list[int]] = [[] for _ in range(num_lanes)]
        self.arrivals[FORWARD] = [0] * pipeline.num_microbatches
        self.positions: list[list[int]] = [[] for _ in range(num_lanes)]  # in the plan, microbatch by microbatch
        for plan in plans:
            for position, lane in enumerate(plan):
                self.positions[lane].append(position)
        self.done = [bytearray(len(plan)) for plan in plans]
        self.heads = [0] * len(plans)  # the first position that may be left to do, weight gradients aside
        self.stashed = [0.0] * len(plans)
        self.refusals = [-1] * num_lanes  # no early forward until the plan is done up to this position
        self.early_lanes = [self._early_lanes(stages, early) for stages in pipeline.stages_of]
        self.weight_lanes = [[3 * stage + WEIGHT for stage in stages] for stages in pipeline.stages_of]

    @staticmethod
    def _early_lanes(stages: Sequence[int], early: Early) -> Lanes:
        lanes = [3 * stage + INPUT for stage in stages] if Early.GRADIENTS in early else []
        return lanes + ([3 * stage for stage in stages] if Early.FORWARDS in early else [])

    def orders(self) -> list[Lanes]:
        """The order in which each rank computes."""
        orders: list[Lanes] = [[] for _ in self.plans]
        free = [0] * len(orders)  # from this tick on
        asleep = [False] * len(orders)
        events = [(0, rank) for rank in range(len(orders))]
        rank_of, durations, arrivals = self.pipeline.rank_of, self.durations, self.arrivals
        while events:
            now, rank = heappop(events)
            if now < free[rank]:
                continue
            lane, wake = self._choose(rank, now)
            asleep[rank] = lane < 0
            if lane < 0:
                if wake < _NEVER:
                    heappush(events, (wake, rank))
                continue
            orders[rank].append(lane)
            self._account(rank, lane)
            free[rank] = end = now + durations[lane]
            heappush(events, (end, rank))
            follower, hop = self.followers[lane]
            if follower >= 0:
                arrivals[follower].append(end + hop)
                receiver = rank_of[follower // 3]
                if asleep[receiver]:
                    heappush(events, (end + hop, receiver))
        assert [len(order) for order in orders] == [len(plan) for plan in self.plans], "the plans wait in a circle"
        return orders

    def _account(self, rank: int, lane: int) -> None:
        """Note that the next microbatch of a lane is done."""
        count = self.counts[lane]
        self.counts[lane] = count + 1
        self.done[rank][self.positions[lane][count]] = 1
        self.stashed[rank] += self.pipeline.stashes[lane]

    def _choose(self, rank: int, now: int) -> tuple[int, int]:
        """The lane that a free rank goes on with; or -1, and when to look again if nothing arrives before."""
        weight = self._pending_weight(rank)
        plan, done, head = self.plans[rank], self.done[rank], self.heads[rank]
        while head < len(plan) and (done[head] or plan[head] % 3 == WEIGHT):
            head += 1
        self.heads[rank] = head
        wake = _NEVER
        if head < len(plan):
            lane = plan[head]
            arrivals, count = self.arrivals[lane], self.counts[lane]
            if count < len(arrivals):
                wake = arrivals[count]
            if wake <= now:
                fits = lane % 3 or self.stashed[rank] + self.pipeline.stashes[lane] <= self.capacities[rank]
                return (lane if fits else weight), _NEVER
            lane, wake = self._choose_early(rank, now, wake)
            if lane >= 0:
                return lane, wake
        if weight >= 0 and wake >= now + self.durations[weight] // 2:
            return weight, wake
        return -1, wake

    def _pending_weight(self, rank: int) -> int:
        """The lane of the weight gradient that is planned first among those that could run, or -1."""
        first, planned = -1, _NEVER
        counts = self.counts
        for lane in self.weight_lanes[rank]:
            count = counts[lane]
            if count < counts[lane - 1] and self.positions[lane][count] < planned:
                first, planned = lane, self.positions[lane][count]
        return first

    def _choose_early(self, rank: int, now: int, wake: int) -> tuple[int, int]:
        """The first lane of the plan that has arrived and may overtake; or -1, and when the next one arrives.

        A lane is not worth it if what is planned before it arrives before half of it is done.
        """
        ready: list[tuple[int, int]] = []
        for lane in self.early_lanes[rank]:
            arrivals, count = self.arrivals[lane], self.counts[lane]
            if count < len(arrivals) and (lane % 3 or self._may_overtake(rank, lane, self.positions[lane][count])):
                if arrivals[count] <= now:
                    ready.append((self.positions[lane][count], lane))
                elif arrivals[count] < wake:
                    wake = arrivals[count]
        for _, lane in sorted(ready):
            if wake >= now + self.durations[lane] // 2:
                return lane, wake
        return -1, wake

    def _may_overtake(self, rank: int, forward: int, planned: int) -> bool:
        """Whether all that is planned before a forward would still find room after it."""
        head = self.heads[rank]
        if head <= self.refusals[forward]:
            return False
        stashes, capacity = self.pipeline.stashes, self.capacities[rank]
        stashed = self.stashed[rank] + stashes[forward]
        plan, done = self.plans[rank], self.done[rank]
        if stashed > capacity:
            return False
        for position in range(head, planned):
            if not done[position]:
                stashed += stashes[plan[position]]
                if stashed > capacity:
                    self.refusals[forward] = position
                    return False
        return True
