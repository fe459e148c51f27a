"""Portfolio: several ways to order the same pipeline, of which the fastest is taken.

No single rule is the best for all durations. A building block fixes roughly how long microbatches are on their
way; list scheduling under the real durations reacts to everything, under evened ones it keeps the block's
rhythm. Playing each order through tells which is the best, by per-rank span and then by makespan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from stagewright.schedules.costs import Costs
from stagewright.schedules.instructions import Computation, Forward, InputGradient, WeightGradient
from stagewright.schedules.library.building_block import BuildingBlock
from stagewright.schedules.library.list_scheduling import FORWARD, WEIGHT, Early, Lanes, ListScheduler, Pipeline

# By how much durations are evened out before list scheduling: as they are, halfway, the same for F, I and W.
_EVENED: Final = (0.0, 0.5, 1.0)

_KINDS: Final = (Forward, InputGradient, WeightGradient)

# Instructions that all tries together may come to; what is left of a long list for a large pipeline is its first tries.
_BUDGET: Final = 100_000


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


def best_orders(pipeline: Pipeline, blocks: Sequence[BuildingBlock], early: Early) -> tuple[list[Computation], ...]:
    """The best order that list scheduling finds, one a rank.

    Args:
        pipeline: what there is to do.
        blocks: where to start from, the most promising first. Those that stash too much are left out; if all do,
            wider spaced repetitions of the last one are tried until one fits.
        early: what may overtake.
    """
    busiest = max(
        pipeline.num_microbatches * sum(sum(pipeline.durations[3 * stage : 3 * stage + 3]) for stage in stages)
        for stages in pipeline.stages_of
    )
    best: tuple[float, float] | None = None
    chosen: list[Lanes] = []
    size = pipeline.num_microbatches * len(pipeline.durations)
    num_tries = 0
    for plans, evened in _tries(pipeline, blocks):
        num_tries += 1
        orders = ListScheduler(evened, plans, early).orders()
        figures = span_and_makespan(pipeline, orders)
        if best is None or figures < best:
            best, chosen = figures, orders
        if best[0] <= busiest * (1 + 1e-9) or (num_tries + 1) * size > _BUDGET:
            break
    return tuple(map(_computations, chosen))


def _tries(pipeline: Pipeline, blocks: Sequence[BuildingBlock]) -> Iterator[tuple[list[Lanes], Pipeline]]:
    """Every block's plans under the real durations, then under evened ones unless these are the same."""
    evened = list(dict.fromkeys(pipeline.evened(share) for share in _EVENED))
    fitting: list[list[Lanes]] = []
    for plans in _fitting_plans(pipeline, blocks):
        fitting.append(plans)
        yield plans, pipeline
    for other in evened[1:]:
        for plans in fitting:
            yield plans, other


def _fitting_plans(pipeline: Pipeline, blocks: Sequence[BuildingBlock]) -> Iterator[list[Lanes]]:
    """The plans of the blocks that fit the capacities, at least one: the last block may be repeated at longer periods."""
    fits = False
    for block in blocks:
        plans = block.plans(pipeline)
        if plans is not None:
            fits = True
            yield plans
    while not fits:
        block = replace(block, spare=block.spare + 1 + block.spare // 4)
        plans = block.plans(pipeline)
        if plans is not None:
            fits = True
            yield plans


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


def _computations(order: Lanes) -> list[Computation]:
    """An order of lanes as instructions: the n-th time that a lane occurs is its microbatch n."""
    counts = dict.fromkeys(order, 0)
    computations: list[Computation] = []
    for lane in order:
        stage, kind = divmod(lane, 3)
        computations.append(_KINDS[kind](stage, counts[lane]))
        counts[lane] += 1
    return computations
