"""List scheduling: whenever a rank is free, it takes the first instruction of its plan that can run.

A plan is the order in which a rank would compute if everything came in time. What comes of it under real
durations is found here by playing the pipeline through: an instruction that has not arrived is overtaken by
later ones, as far as the stash allows, and weight gradients, which nobody waits for, fill the gaps or make room
(Qi et al. 2024, section 3.1, whose heuristic this takes further).

    pipeline = pipeline_of(rank_of, num_microbatches, costs, capacities)
    plans = BuildingBlock(…).plans(pipeline)           # a list of lanes for each rank, see lanes.py
    orders = ListScheduler(pipeline, plans).orders()   # lists of lanes again, each a rearrangement of its plan
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

from stagewright.schedules.library.lanes import FORWARD, INPUT, WEIGHT, Lanes, Pipeline

_NEVER: Final = 1 << 62
_TICKS: Final = (
    1_000_000  # that the longest instruction takes: times are whole numbers, so that equal ones compare equal
)


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
        gradients_early: whether input gradients may overtake; forwards always may.
        patience: how much of a weight gradient must fit into a gap for it to be put there; a part of 1.
    """

    def __init__(
        self, pipeline: Pipeline, plans: Sequence[Lanes], gradients_early: bool = True, patience: float = 0.0
    ) -> None:
        scale = _TICKS / (max(pipeline.durations) or 1.0)
        self.durations = [round(duration * scale) for duration in pipeline.durations]
        self.followers = [(lane, round(hop * scale)) for lane, hop in pipeline.followers]
        self.pipeline = pipeline
        self.plans = plans
        self.patience = patience
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
        self.owed = [0] * len(plans)  # time for the weight gradients whose input gradients are done
        self.last_forwards = [max(position for position, lane in enumerate(plan) if lane % 3 == 0) for plan in plans]
        # By how much a rank may be done later than the last gradient gets from it to the first rank, see _share_to_fit.
        self.slack = [self._way_back(stages[0]) for stages in pipeline.stages_of]
        kinds = (INPUT, FORWARD) if gradients_early else (FORWARD,)
        self.early_lanes = [[3 * stage + kind for kind in kinds for stage in stages] for stages in pipeline.stages_of]
        self.weight_lanes = [[3 * stage + WEIGHT for stage in stages] for stages in pipeline.stages_of]

    def _way_back(self, stage: int) -> int:
        """What a gradient takes from a stage to the first one."""
        return sum(self.durations[3 * before + INPUT] + self.followers[3 * before][1] for before in range(stage))

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
            if not orders[rank]:
                self.slack[rank] += now
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
        if lane % 3 == INPUT:
            self.owed[rank] += self.durations[lane + 1]
        elif lane % 3 == WEIGHT:
            self.owed[rank] -= self.durations[lane]

    def _choose(self, rank: int, now: int) -> tuple[int, int]:
        """The lane that a free rank goes on with; or -1, and when to look again if nothing arrives before."""
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
                return (lane if fits else self._pending_weight(rank)), _NEVER
            lane, wake = self._choose_early(rank, now, wake)
            if lane >= 0:
                return lane, wake
        weight = self._pending_weight(rank)
        if weight >= 0 and wake >= now + self.durations[weight] * self._share_to_fit(rank):
            return weight, wake
        return -1, wake

    def _share_to_fit(self, rank: int) -> float:
        """How much of a weight gradient must fit into a gap.

        All of it once a rank has no forwards left, as long as it can make up for what it owes while its last
        gradient is on its way to the first rank, and for as much longer as it has started later than that.
        """
        can_wait = self.heads[rank] > self.last_forwards[rank] and self.owed[rank] <= self.slack[rank]
        return 1.0 if can_wait else self.patience

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
