"""Building blocks: the way of one microbatch in slots, and the plans that come of repeating it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.schedules import Costs
from stagewright.schedules.library.building_block import BuildingBlock
from stagewright.schedules.library.lanes import Pipeline, computations, pipeline_of

STRAIGHT = BuildingBlock(forward=(0, 0), gradient=(0, 0))


def vee(num_ranks: int, num_microbatches: int, capacity: float) -> Pipeline:
    rank_of = [*range(num_ranks), *reversed(range(num_ranks))]
    return pipeline_of(rank_of, num_microbatches, Costs(), [capacity] * num_ranks)


def line(num_ranks: int, num_microbatches: int, capacity: float) -> Pipeline:
    return pipeline_of(range(num_ranks), num_microbatches, Costs(), [capacity] * num_ranks)


def slots(block: BuildingBlock, pipeline: Pipeline, kind: int) -> list[int]:
    return block.slots(pipeline)[0][kind::3]


def plan_texts(block: BuildingBlock, pipeline: Pipeline) -> list[str]:
    plans = block.plans(pipeline)
    assert plans is not None
    return [" ".join(map(str, computations(plan))) for plan in plans]


def test_straight_through_where_no_slots_collide() -> None:
    """Four ranks: every hop takes one slot, as in V-Min, and every rank has its six slots of a period taken."""
    pipeline = vee(4, 1, 8)
    assert slots(STRAIGHT, pipeline, 0) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert slots(STRAIGHT, pipeline, 1) == [15, 14, 13, 12, 11, 10, 9, 8]
    assert slots(STRAIGHT, pipeline, 2) == [17, 17, 15, 14, 13, 12, 10, 10]


def test_a_taken_slot_delays() -> None:
    """Three ranks: forwards and gradients would meet in the same slots."""
    assert slots(STRAIGHT, vee(3, 1, 6), 0) == [0, 1, 2, 3, 4, 5]
    assert slots(STRAIGHT, vee(3, 1, 6), 1) == [14, 12, 11, 10, 8, 7]


def test_pauses_add_up_as_fractions() -> None:
    block = BuildingBlock(forward=(0.5,), gradient=(0,), turn=2, spare=97)
    assert slots(block, line(5, 1, 5), 0) == [0, 1, 3, 4, 6]
    assert slots(block, line(5, 1, 5), 1) == [13, 12, 11, 10, 9]
    assert block.slots(line(5, 1, 5))[1] == 100


def test_the_plan_of_a_line() -> None:
    assert plan_texts(BuildingBlock(forward=(0,), gradient=(0,)), line(2, 3, 2)) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2",
    ]


def test_weight_gradients_make_room() -> None:
    """The second rank has two slots between F0 and W0; with one stash, F1 must wait for W0 to come first."""
    block = BuildingBlock(forward=(0,), gradient=(1,))
    assert plan_texts(block, line(2, 2, 2))[0] == "0F0 0F1 0I0 0W0 0I1 0W1"
    assert block.plans(line(2, 2, 1)) is None
    assert plan_texts(BuildingBlock((0,), (0,), spare=7), line(2, 2, 1))[0] == "0F0 0I0 0W0 0F1 0I1 0W1"


def test_v_min_always_fits_its_bound() -> None:
    for num_ranks in range(1, 40):
        assert STRAIGHT.plans(vee(num_ranks, 2 * num_ranks, 2 * ((num_ranks + 4) // 3))) is not None


pauses = st.sampled_from((0.0, 0.25, 0.5, 1.0, 2.0))


@settings(max_examples=60, deadline=None)
@given(
    num_ranks=st.integers(1, 8),
    num_microbatches=st.integers(1, 12),
    capacity=st.integers(2, 16),
    hops=st.tuples(pauses, pauses, pauses, pauses),
    turn=st.integers(0, 3),
    spare=st.integers(0, 3),
)
def test_plans_are_complete_and_keep_the_capacity(
    num_ranks: int,
    num_microbatches: int,
    capacity: int,
    hops: tuple[float, float, float, float],
    turn: int,
    spare: int,
) -> None:
    pipeline = vee(num_ranks, num_microbatches, capacity)
    plans = BuildingBlock(hops[:2], hops[2:], turn, spare).plans(pipeline)
    for rank, plan in enumerate(plans or []):
        lanes = [3 * stage + kind for stage in pipeline.stages_of[rank] for kind in range(3)]
        assert sorted(plan) == sorted(lanes * num_microbatches)
        stashed = 0.0
        for lane in plan:
            stashed += pipeline.stashes[lane]
            assert 0 <= stashed <= capacity
