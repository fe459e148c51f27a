"""DualPipe and DualPipeV: the published orders, idle times and peaks, over many shapes and costs."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.schedules import Costs, Program, ScheduleError, create, simulate, verify
from stagewright.schedules.drawing import grid_text
from stagewright.schedules.instructions import Backward, Forward, InputGradient, Overlap, ReduceGradient, WeightGradient

STREAM = Path(__file__).parents[2] / "data" / "streams" / "dualpipev_P4_M8.csv"
FUSED_AT_3 = Costs(forward=1, backward=2, weight_gradient=1, overlapped=3)


def tokens(name: str, rank: int, num_ranks: int, num_microbatches: int) -> str:
    schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return " ".join(map(str, schedule.order(rank)))


def idle(name: str, num_ranks: int, num_microbatches: int, costs: Costs) -> list[float]:
    timeline = simulate(create(name, num_ranks=num_ranks, num_microbatches=num_microbatches).program(), costs)
    return [round(timeline.makespan - busy, 9) for busy in timeline.busy]


@pytest.mark.parametrize(
    ("rank", "order"),
    [
        (
            0,
            "0F0 0F1 0F2 3F4 3I4 3W4 3F5 (0F3;3B5)OVERLAP_F_B (3F6;0B0)OVERLAP_F_B 3B6 (3F7;0B1)OVERLAP_F_B 3B7 "
            "0I2 0W2 0I3 0W3",
        ),
        (  # the mirror image of rank 0: the other half of the microbatches
            3,
            "0F4 0F5 0F6 3F0 3I0 3W0 3F1 (0F7;3B1)OVERLAP_F_B (3F2;0B4)OVERLAP_F_B 3B2 (3F3;0B5)OVERLAP_F_B 3B3 "
            "0I6 0W6 0I7 0W7",
        ),
        (  # a middle rank: the first pair apart, and the last weight gradients first in, first out
            1,
            "1F0 2F4 1F1 2F5 1F2 2B4 (2F6;1B0)OVERLAP_F_B (1F3;2B5)OVERLAP_F_B (2F7;1B1)OVERLAP_F_B "
            "2B6 1B2 2I7 1I3 2W7 1W3",
        ),
    ],
)
def test_published_order(rank: int, order: str) -> None:
    assert tokens("dualpipe", rank, 4, 8) == order


def test_dualpipev_is_the_reference_stream_token_for_token() -> None:
    lines = STREAM.read_text("utf-8").splitlines()
    assert [tokens("dualpipev", rank, 4, 8).replace(" ", ",") for rank in range(4)] == lines


def test_dualpipev_takes_51_serialised_and_54_with_atomic_pairs() -> None:
    program = create("dualpipev", num_ranks=4, num_microbatches=8).program()
    assert simulate(program, FUSED_AT_3).makespan == 54
    halves = []
    for stream in program.streams:
        pairs = [(item.forward, item.backward) if isinstance(item, Overlap) else (item,) for item in stream]
        computing = (Forward, Backward, InputGradient, WeightGradient)
        halves.append(tuple(half for pair in pairs for half in pair if isinstance(half, computing)))
    assert simulate(replace(program, streams=tuple(halves))).makespan == 51


@pytest.mark.parametrize(
    ("name", "num_ranks", "wait"),
    [("dualpipe", 2, 0), ("dualpipe", 4, 2), ("dualpipe", 8, 6), ("dualpipev", 4, 6), ("dualpipev", 8, 14)],
)
@pytest.mark.parametrize("multiple", [2, 3, 8])
def test_idle_time_with_atomic_pairs(name: str, num_ranks: int, wait: float, multiple: int) -> None:
    assert idle(name, num_ranks, multiple * num_ranks, FUSED_AT_3) == [wait] * num_ranks


def test_makespans_at_four_ranks_and_eight_microbatches() -> None:
    program = create("dualpipe", num_ranks=4, num_microbatches=8).program()
    assert simulate(program, FUSED_AT_3).makespan == 26
    assert simulate(program, FUSED_AT_3).peak_stash == (5, 5, 5, 5)
    assert simulate(program, replace(FUSED_AT_3, overlapped=2.4)).makespan == pytest.approx(23.6)


def test_formula_is_an_upper_bound_where_input_gradients_take_longer_than_forwards() -> None:
    costs = Costs(forward=1, input_gradient=1.3, weight_gradient=0.7, overlapped=2.6)
    schedule = create("dualpipe", num_ranks=8, num_microbatches=16)
    assert schedule.bubble_formula(costs).idle == pytest.approx(7.5)
    assert max(idle("dualpipe", 8, 16, costs)) == pytest.approx(6.6)


SHAPES = st.one_of(
    st.tuples(st.just("dualpipe"), st.integers(1, 5).map(lambda half: 2 * half), st.integers(0, 6)),
    st.tuples(st.just("dualpipev"), st.integers(1, 8), st.integers(0, 9)),
)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.floats(0.1, 1), st.floats(0, 1))
def test_formula_gives_the_idle_time_of_the_rank_that_waits_most(
    shape: tuple[str, int, int], weight: float, overlap: float
) -> None:
    name, num_ranks, more = shape
    num_microbatches = 2 * num_ranks + more * (2 if name == "dualpipe" else 1)
    # F = I = 1, W <= F, and a fused pair takes from B to F + B.
    costs = Costs(forward=1, input_gradient=1, weight_gradient=weight, overlapped=1 + weight + overlap)
    formula = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches).bubble_formula(costs)
    gaps = num_ranks / 2 - 1 if name == "dualpipe" else num_ranks - 1
    assert formula.idle == pytest.approx(gaps * (2 + 2 * weight + overlap - 3 * weight))
    timeline = simulate(create(name, num_ranks=num_ranks, num_microbatches=num_microbatches).program(), costs)
    assert timeline.makespan - min(timeline.busy) == pytest.approx(formula.idle)
    assert min(timeline.busy) == pytest.approx(formula.ideal)


@settings(max_examples=40, deadline=None)
@given(SHAPES)
def test_legal_for_every_shape_and_over_several_steps(shape: tuple[str, int, int]) -> None:
    name, num_ranks, more = shape
    num_microbatches = 2 * num_ranks + more * (2 if name == "dualpipe" else 1)
    schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    for steps in (1, 2):
        program = schedule.program(steps)
        verify(program, semantics="rendezvous")
        verify(Program.from_csv(program.to_csv(), placement=program.placement, num_microbatches=num_microbatches))
    peak = num_ranks + 1 if name == "dualpipe" else 2 * num_ranks + 1
    assert simulate(schedule.program()).peak_stash == (peak,) * num_ranks


def test_the_mirrored_half_runs_the_other_way() -> None:
    placement = create("dualpipe", num_ranks=4, num_microbatches=10).placement
    assert [placement.rank_of(stage, 4) for stage in range(4)] == [0, 1, 2, 3]
    assert [placement.rank_of(stage, 5) for stage in range(4)] == [3, 2, 1, 0]
    assert placement.rank_of(0, 15) == 3  # of the next batch
    assert [placement.replicas_of(stage) for stage in range(4)] == [(0, 3), (1, 2), (1, 2), (0, 3)]


@pytest.mark.parametrize("num_ranks", [2, 4, 6, 8])
def test_both_ranks_of_a_pair_reduce_their_stages_in_one_order(num_ranks: int) -> None:
    """Each needs the other for both sums: in different orders they would wait for each other."""
    program = create("dualpipe", num_ranks=num_ranks, num_microbatches=2 * num_ranks).program(2)
    for rank, stream in enumerate(program.streams):
        near = min(rank, num_ranks - 1 - rank)
        reductions = [instruction.stage for instruction in stream if isinstance(instruction, ReduceGradient)]
        assert reductions == [num_ranks - 1 - near, near] * 2


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches", "message"),
    [
        (
            "dualpipe",
            4,
            7,
            "dualpipe needs an even number of microbatches, at least twice the ranks: got 7 on 4 ranks; use 8 or more",
        ),
        (
            "dualpipe",
            4,
            6,
            "dualpipe needs an even number of microbatches, at least twice the ranks: got 6 on 4 ranks; use 8 or more",
        ),
        (
            "dualpipe",
            4,
            11,
            "dualpipe needs an even number of microbatches, at least twice the ranks: got 11 on 4 ranks; use 10 or 12",
        ),
        (
            "dualpipe",
            3,
            8,
            "dualpipe needs an even number of ranks, half of them for each direction to enter at: got 3; use 2 or 4, "
            "or dualpipev",
        ),
        (
            "dualpipev",
            3,
            5,
            "dualpipev needs at least twice as many microbatches as ranks: got 5 on 3 ranks; use 6 or more",
        ),
    ],
)
def test_refusals_say_rule_numbers_and_remedy(name: str, num_ranks: int, num_microbatches: int, message: str) -> None:
    with pytest.raises(ScheduleError) as refusal:
        create(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    assert str(refusal.value) == message


def test_grid_of_the_smallest_pipeline() -> None:
    """Two ranks never wait: each forward of the one direction finds a backward of the other beside it."""
    program = create("dualpipe", num_ranks=2, num_microbatches=4).program()
    assert grid_text(simulate(program)) == (
        "rank 0  F0 f2 F1 b2 -- f3&B0 -- b3 -- I1 W1\n"  #
        "rank 1  f2 F0 f3 B0 -- F1&b2 -- B1 -- i3 w3"
    )
