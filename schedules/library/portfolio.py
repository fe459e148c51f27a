"""Portfolio: several ways to order the same pipeline, of which the fastest is taken.

No single rule is the best for all durations. A building block fixes roughly how long microbatches are on their
way; list scheduling under the real durations reacts to everything, under evened ones it keeps the block's
rhythm. Playing each order through tells which is the best, by per-rank span and then by makespan.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from typing import ClassVar, Final

from stagewright.schedules.costs import Costs
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.instructions import Computation
from stagewright.schedules.library.building_block import BuildingBlock
from stagewright.schedules.library.lanes import Lanes, Pipeline, computations, span_and_makespan
from stagewright.schedules.library.list_scheduling import ListScheduler
from stagewright.schedules.schedule import Order, Schedule

# Ways to schedule a block: the share by which durations are evened out, and the patience (see ListScheduler).
_WAYS: Final = ((0.0, 0.0), (1.0, 0.0), (0.5, 0.5), (0.0, 0.5), (1.0, 0.5))

# Instructions that all tries together may come to, so that a large pipeline is tried in fewer ways.
_BUDGET: Final = 200_000


# F = I = W, one stash entry a microbatch.
_EQUAL: Final = Costs()


@dataclass(frozen=True)
class ListScheduled(Schedule, ABC):
    """A schedule whose orders are the best of a portfolio.

    Args:
        costs: what the stages cost; the order is made for them.
    """

    costs: Costs = _EQUAL

    # Of some hundred random blocks, those that came out best for some F:I:W from 1:1:1 to 1:2:0.5 on 3 to 24 ranks.
    blocks: ClassVar[tuple[BuildingBlock, ...]]
    gradients_early: ClassVar[bool] = True

    def check(self) -> None:
        """Refuse costs that are not those of this many stages."""
        if not isinstance(self.costs, Costs):
            raise ScheduleError(f"costs are given as Costs(forward=…, …): got {self.costs!r}")
        self.costs.of_stages(self.num_stages)

    @property
    @abstractmethod
    def pipeline(self) -> Pipeline:
        """What there is to schedule, and within which memory."""

    def order(self, rank: int) -> Order:
        """What the best order of the portfolio has for this rank."""
        return self._orders[rank]

    @cached_property
    def _orders(self) -> tuple[list[Computation], ...]:
        return tuple(map(computations, best_orders(self.pipeline, self.blocks, self.gradients_early)))


def best_orders(pipeline: Pipeline, blocks: Sequence[BuildingBlock], gradients_early: bool) -> list[Lanes]:
    """The best order that list scheduling finds, one a rank.

    Args:
        pipeline: what there is to do.
        blocks: where to start from, the most promising first. Those that stash too much are left out; if all do,
            the last one is repeated at longer and longer periods until it fits.
        gradients_early: whether input gradients may overtake.
    """
    busiest = max(
        sum(sum(pipeline.durations[3 * stage : 3 * stage + 3]) for stage in own) for own in pipeline.stages_of
    )
    best: tuple[tuple[float, float], list[Lanes]] | None = None
    for plans, evened, patience in _tries(pipeline, blocks):
        orders = ListScheduler(evened, plans, gradients_early, patience).orders()
        figures = span_and_makespan(pipeline, orders)
        if best is None or figures < best[0]:
            best = figures, orders
        if best[0][0] <= busiest * pipeline.num_microbatches * (1 + 1e-9):
            break  # no rank ever waits
    assert best is not None, "some block fits"
    return best[1]


def _tries(pipeline: Pipeline, blocks: Sequence[BuildingBlock]) -> Iterator[tuple[list[Lanes], Pipeline, float]]:
    """Plans, with the durations and the patience to schedule them with: first blocks and first ways first."""
    num_tries = max(_BUDGET // (pipeline.num_microbatches * len(pipeline.durations)), 1)
    plans = list(islice(_fitting_plans(pipeline, blocks), num_tries))
    evened = [(pipeline.evened(share), patience) for share, patience in _WAYS]
    ways = [way for index, way in enumerate(evened) if way not in evened[:index]]
    for block, way in sorted(product(range(len(plans)), range(len(ways))), key=sum)[:num_tries]:
        yield plans[block], *ways[way]


def _fitting_plans(pipeline: Pipeline, blocks: Sequence[BuildingBlock]) -> Iterator[list[Lanes]]:
    """The plans of all blocks that fit the capacities, at least one."""
    fits = False
    for block in blocks:
        plans = block.plans(pipeline)
        if plans is not None:
            fits = True
            yield plans
    block = blocks[-1]
    while not fits:
        block = replace(block, spare=block.spare + 1 + block.spare // 4)
        plans = block.plans(pipeline)
        if plans is not None:
            fits = True
            yield plans
