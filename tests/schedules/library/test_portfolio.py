"""Portfolio: the best of several orders, and no more of them than a large pipeline allows."""

import pytest

from stagewright.schedules import Costs, create
from stagewright.schedules.library import portfolio
from stagewright.schedules.library.building_block import BuildingBlock
from stagewright.schedules.library.lanes import Pipeline, computations, pipeline_of, span_and_makespan
from stagewright.schedules.library.list_scheduling import ListScheduler
from stagewright.schedules.library.portfolio import best_orders

BLOCKS = (BuildingBlock((0,), (0,)), BuildingBlock((1,), (1,)), BuildingBlock((2,), (2,)))


def line(num_ranks: int, num_microbatches: int, capacity: float) -> Pipeline:
    costs = Costs(1, input_gradient=1.3, weight_gradient=0.7)
    return pipeline_of(range(num_ranks), num_microbatches, costs, [capacity] * num_ranks)


def test_the_best_is_taken() -> None:
    pipeline = line(6, 18, 12)
    best = span_and_makespan(pipeline, best_orders(pipeline, BLOCKS, gradients_early=True))
    for block in BLOCKS:
        plans = block.plans(pipeline)
        assert plans is not None
        for share in (0, 0.5, 1):
            assert best <= span_and_makespan(pipeline, ListScheduler(pipeline.evened(share), plans).orders())


@pytest.mark.parametrize(("budget", "num_tries"), [(0, 1), (3 * 6 * 18 * 4, 4), (10**9, 15)])
def test_the_budget_is_kept(budget: int, num_tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks, five ways to schedule each of them."""
    scheduled: list[Pipeline] = []

    class Counted(ListScheduler):
        def __init__(self, pipeline: Pipeline, *rest: object) -> None:
            scheduled.append(pipeline)
            super().__init__(pipeline, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(portfolio, "_BUDGET", budget)
    monkeypatch.setattr(portfolio, "ListScheduler", Counted)
    best_orders(line(6, 18, 12), BLOCKS, gradients_early=True)
    assert len(scheduled) == num_tries


def test_a_block_that_stashes_too_much_is_spaced_wider() -> None:
    pipeline = line(6, 4, 1)
    assert all(block.plans(pipeline) is None for block in BLOCKS)
    orders = best_orders(pipeline, BLOCKS, gradients_early=True)
    assert " ".join(map(str, computations(orders[0]))) == "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2 0F3 0I3 0W3"


def test_all_ranks_share_one_construction() -> None:
    schedule = create("v-half", num_ranks=4, num_microbatches=8)
    assert all(schedule.order(rank) is schedule.order(rank) for rank in range(4))
    assert schedule == create("v-half", num_ranks=4, num_microbatches=8)
