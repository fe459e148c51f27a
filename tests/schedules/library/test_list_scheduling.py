"""List scheduling: what may overtake what, and that an order is played through as simulation does it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.schedules import Costs, Placement, Program, simulate
from stagewright.schedules.library.building_block import BuildingBlock
from stagewright.schedules.library.lanes import Lanes, Pipeline, computations, pipeline_of, span_and_makespan
from stagewright.schedules.library.list_scheduling import ListScheduler


def lanes_of(text: str) -> Lanes:
    """Lanes of tokens without their microbatches: ``0F 0I 1W``."""
    return [3 * int(token[0]) + "FIW".index(token[1]) for token in text.split()]


def scheduled(pipeline: Pipeline, plans: list[str], **options: object) -> list[str]:
    orders = ListScheduler(pipeline, [lanes_of(plan) for plan in plans], **options).orders()  # type: ignore[arg-type]
    return [" ".join(map(str, computations(order))) for order in orders]


def line(num_ranks: int, num_microbatches: int, capacity: float, costs: Costs = Costs()) -> Pipeline:  # noqa: B008
    return pipeline_of(range(num_ranks), num_microbatches, costs, [capacity] * num_ranks)


def test_a_plan_in_time_is_kept() -> None:
    assert scheduled(line(1, 2, 2), ["0F 0F 0I 0W 0I 0W"]) == ["0F0 0F1 0I0 0I1 0W0 0W1"]  # W when nothing else is left
    assert scheduled(line(1, 2, 1), ["0F 0I 0W 0F 0I 0W"]) == ["0F0 0I0 0W0 0F1 0I1 0W1"]  # W makes room


def test_a_weight_gradient_fills_a_gap() -> None:
    """Rank 0 waits for its second gradient from tick 6 on, with one W to do."""
    plans = ["0F 0F 0I 0I 0W 0W", "1F 1I 1F 1I 1W 1W"]
    assert scheduled(line(2, 2, 2), plans)[0] == "0F0 0F1 0I0 0W0 0I1 0W1"


@pytest.mark.parametrize(
    ("patience", "order"),
    [(0.0, "1F0 1I0 1W0 1F1 1I1 1W1"), (0.5, "1F0 1I0 1W0 1F1 1I1 1W1"), (1.0, "1F0 1I0 1F1 1I1 1W0 1W1")],
)
def test_patience(patience: float, order: str) -> None:
    """Rank 1 waits for F1 from tick 5 to 6, with a W of a tick and a half to do."""
    costs = Costs(forward=(3, 1), input_gradient=1, weight_gradient=1.5)
    plans = ["0F 0F 0I 0I 0W 0W", "1F 1I 1F 1I 1W 1W"]
    assert scheduled(line(2, 2, 2, costs), plans, patience=patience)[1] == order


def test_a_short_gap_is_left_once_there_are_no_forwards() -> None:
    """Rank 1 waits for I1 from tick 5.5 to 7, and rank 0 for its gradient in turn, which takes it 5 ticks.

    Having started a tick later than rank 0, rank 1 can make up for a W of four ticks afterwards, not for one of ten.
    """
    costs = Costs(forward=(1, 1, 0.5), input_gradient=(5, 1, 2), weight_gradient=(1, 10, 1))
    plans = ["0F 0F 0I 0I 0W 0W", "1F 1F 1I 1I 1W 1W", "2F 2I 2F 2I 2W 2W"]
    assert scheduled(line(3, 2, 2, costs), plans)[1] == "1F0 1F1 1I0 1W0 1I1 1W1"
    quick = Costs(forward=(1, 1, 0.5), input_gradient=(5, 1, 2), weight_gradient=(1, 4, 1))
    assert scheduled(line(3, 2, 2, quick), plans)[1] == "1F0 1F1 1I0 1I1 1W0 1W1"


def test_forwards_overtake_as_far_as_there_is_room() -> None:
    """Rank 0 is to do I0 after F1, yet it comes late: F2 fits three stashes, not two."""
    plans = ["0F 0F 0I 0W 0F 0I 0W 0I 0W", "1F 1I 1W 1F 1I 1W 1F 1I 1W"]
    costs = Costs(forward=1, input_gradient=3, weight_gradient=1)
    assert scheduled(line(2, 3, 3, costs), plans)[0].startswith("0F0 0F1 0F2 0I0")
    assert scheduled(line(2, 3, 2, costs), plans)[0].startswith("0F0 0F1 0I0 0W0 0F2")


def test_gradients_overtake_unless_told_not_to() -> None:
    """Rank 1 is to do F1 before I0, but the first rank is slow to send it."""
    plans = ["0F 0F 0I 0I 0W 0W", "1F 1F 1I 1I 1W 1W"]
    costs = Costs(forward=(5, 1), input_gradient=1, weight_gradient=1)
    assert scheduled(line(2, 2, 2, costs), plans)[1] == "1F0 1I0 1W0 1F1 1I1 1W1"
    assert scheduled(line(2, 2, 2, costs), plans, gradients_early=False)[1] == "1F0 1F1 1I0 1I1 1W0 1W1"


def test_plans_that_wait_in_a_circle_are_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="in a circle"):
        scheduled(line(2, 2, 1), ["0F 0F 0I 0W 0I 0W", "1F 1I 1W 1F 1I 1W"])


ticks = st.sampled_from((0.0, 0.3, 1.0, 1.7, 4.0))


@settings(max_examples=80, deadline=None)
@given(
    num_ranks=st.integers(1, 6),
    num_microbatches=st.integers(1, 10),
    is_vee=st.booleans(),
    durations=st.tuples(ticks, ticks, ticks),
    send=ticks,
    room=st.integers(1, 12),
    gradients_early=st.booleans(),
    patience=st.sampled_from((0.0, 0.5, 1.0)),
)
def test_orders_rearrange_their_plans_within_the_capacity(
    num_ranks: int,
    num_microbatches: int,
    is_vee: bool,
    durations: tuple[float, float, float],
    send: float,
    room: int,
    gradients_early: bool,
    patience: float,
) -> None:
    """And what playing them through tells of their span is what simulation tells."""
    rank_of = [*range(num_ranks), *reversed(range(num_ranks))] if is_vee else list(range(num_ranks))
    num_stages = len(rank_of)
    costs = Costs(durations[0], input_gradient=durations[1], weight_gradient=durations[2], send=send)
    capacity = 3 * room * num_stages // num_ranks
    stashes = ([1.0] * num_stages, [2.0] * num_stages)
    pipeline = pipeline_of(rank_of, num_microbatches, costs, [capacity] * num_ranks, stashes)
    block = BuildingBlock((0, 0), (0, 0), spare=2 * num_stages if room < num_ranks else 0)
    plans = block.plans(pipeline)
    assert plans is not None
    orders = ListScheduler(pipeline, plans, gradients_early, patience).orders()
    for order, plan in zip(orders, plans):
        assert sorted(order) == sorted(plan)
        stashed = 0.0
        for lane in order:
            stashed += pipeline.stashes[lane]
            assert stashed <= capacity
    program = Program(
        tuple(tuple(computations(order)) for order in orders), Placement((tuple(rank_of),)), num_microbatches
    )
    timeline = simulate(program, costs)
    if durations[0] > 0 and durations[2] > 0:
        assert span_and_makespan(pipeline, orders) == pytest.approx((timeline.span, timeline.makespan))
