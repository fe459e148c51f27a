"""Building block: the way of one microbatch through all ranks, repeated at a fixed period (Qi et al., NeurIPS 2024).

Time is counted in slots, one instruction each. A rank has as many slots a period as it has instructions for
one microbatch, so a repeated block keeps every rank busy all the time, and how long a microbatch stays on its
way decides how much is stashed. From there it is list scheduling that makes the ends fit, and real durations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stagewright.schedules.library.lanes import FORWARD, INPUT, WEIGHT, Lanes, Pipeline


@dataclass(frozen=True)
class BuildingBlock:
    """How one microbatch passes through the pipeline.

    Args:
        forward: slots that it pauses at each hop on its way forward; one number a chunk.
        gradient: slots that its gradient pauses at each hop on its way back; one number a chunk.
        turn: slots that it pauses between its last forward and its first gradient.
        spare: slots of each period in which a rank has nothing to do.
    """

    forward: tuple[float, ...]
    gradient: tuple[float, ...]
    turn: int = 0
    spare: int = 0

    def slots(self, pipeline: Pipeline) -> tuple[list[int], int]:
        """The slot of each lane, and the slots of a period.

        A pass whose slot is taken, period for period, by another one waits for the next free one. Pauses add
        up as they are, fractions too.
        """
        num_slots = 3 * max(map(len, pipeline.stages_of)) + self.spare
        taken = [[False] * num_slots for _ in pipeline.stages_of]
        slots = [0] * len(pipeline.durations)
        rank_of, chunk_of = pipeline.rank_of, _chunks(pipeline)
        time = 0.0
        for stage, rank in enumerate(rank_of):
            slots[3 * stage + FORWARD] = slot = _take(taken[rank], time)
            time = max(time, slot) + 1
            if stage + 1 < len(rank_of) and rank_of[stage + 1] != rank:
                time += self.forward[chunk_of[stage]]
        time += self.turn
        for stage in reversed(range(len(rank_of))):
            rank = rank_of[stage]
            slots[3 * stage + INPUT] = slot = _take(taken[rank], time)
            time = max(time, slot) + 1
            if stage and rank_of[stage - 1] != rank:
                time += self.gradient[chunk_of[stage]]
        for stage in reversed(range(len(rank_of))):
            slots[3 * stage + WEIGHT] = _take(taken[rank_of[stage]], slots[3 * stage + INPUT] + 1)
        return slots, num_slots

    def plans(self, pipeline: Pipeline) -> list[Lanes] | None:
        """The order of each rank if the block is repeated for every microbatch, or None if it stashes too much."""
        slots, period = self.slots(pipeline)
        plans = []
        for rank in range(len(pipeline.capacities)):
            plan = _plan(pipeline, rank, slots, period)
            if plan is None:
                return None
            plans.append(plan)
        return plans


def _chunks(pipeline: Pipeline) -> list[int]:
    """The how-manieth of its rank's stages each stage is."""
    return [pipeline.stages_of[rank].index(stage) for stage, rank in enumerate(pipeline.rank_of)]


def _take(taken: list[bool], time: float) -> int:
    """Take the first slot from a time on that is free in every period."""
    slot = int(time)
    while taken[slot % len(taken)]:
        slot += 1
    taken[slot % len(taken)] = True
    return slot


def _plan(pipeline: Pipeline, rank: int, slots: Sequence[int], period: int) -> Lanes | None:
    """One rank's instructions in the order of their slots, with weight gradients brought forward for lack of room."""
    stashes, capacity = pipeline.stashes, pipeline.capacities[rank] * (1 + 1e-9)
    lanes = [3 * stage + kind for stage in pipeline.stages_of[rank] for kind in (FORWARD, INPUT, WEIGHT)]
    starts = range(0, period * pipeline.num_microbatches, period)
    planned = sorted((start + slots[lane], lane) for lane in lanes for start in starts)
    plan: Lanes = []
    stashed = 0.0
    num_inputs, num_weights = dict.fromkeys(lanes, 0), dict.fromkeys(lanes, 0)
    for slot, lane in planned:
        if lane % 3 == WEIGHT and num_weights[lane] * period + slots[lane] > slot:
            continue  # brought forward
        if lane % 3 == INPUT:
            num_inputs[lane + 1] += 1
        while stashed + stashes[lane] > capacity:
            pending = [weight for weight in lanes if num_weights[weight] < num_inputs[weight]]
            if not pending:
                return None
            first = min(pending, key=lambda weight: num_weights[weight] * period + slots[weight])
            num_weights[first] += 1
            stashed += stashes[first]
            plan.append(first)
        if lane % 3 == WEIGHT:
            num_weights[lane] += 1
        stashed += stashes[lane]
        plan.append(lane)
    return plan
