"""Chimera: bubble, peak and copies of the weights as published, and what holds for the shapes in between."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.schedules import Costs, ScheduleError, create, simulate, verify
from stagewright.schedules.drawing import grid_text
from stagewright.schedules.instructions import Backward, Forward, ReduceGradient

EQUAL = Costs(forward=1, backward=1)
SHAPES = st.sampled_from(
    [(ranks, pairs) for ranks in (2, 4, 6, 8, 12) for pairs in range(1, 7) if ranks // 2 % pairs == 0]
)


def test_the_published_figure_for_four_ranks() -> None:
    """Li and Hoefler 2021: two idle slots on each rank, where 1F1B has six."""
    program = create("chimera", num_ranks=4, num_microbatches=4).program()
    assert grid_text(simulate(program, EQUAL)) == (
        "rank 0  F0 F1 .. f2 b2 f3 b3 B0 .. B1\n"
        "rank 1  .. F0 f2 F1 f3 b2 B0 b3 B1 ..\n"
        "rank 2  .. f2 F0 f3 F1 B0 b2 B1 b3 ..\n"
        "rank 3  f2 f3 .. F0 B0 F1 B1 b2 .. b3"
    )


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 5))
def test_published_fraction(shape: tuple[int, int], multiple: int) -> None:
    """(P-2f)/(2fM+P-2f) at F = B, for M = P, 2P and every further multiple, whatever the number of pairs."""
    p, f = shape
    m = multiple * p
    schedule = create("chimera", num_ranks=p, num_microbatches=m, num_pairs=f)
    fraction = Fraction(p - 2 * f, 2 * f * m + p - 2 * f)
    timeline = simulate(schedule.program(), EQUAL)
    assert timeline.bubble_fraction == pytest.approx(float(fraction))
    assert timeline.makespan == 2 * m + p // f - 2
    assert schedule.bubble_formula(EQUAL).fraction == pytest.approx(float(fraction))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 4, 6, 8, 12]), st.integers(0, 30))
def test_one_pair_keeps_to_it_for_any_number_of_microbatches_from_p_up(num_ranks: int, more: int) -> None:
    num_microbatches = num_ranks + more
    schedule = create("chimera", num_ranks=num_ranks, num_microbatches=num_microbatches)
    timeline = simulate(schedule.program(), EQUAL)
    assert timeline.makespan == 2 * num_microbatches + num_ranks - 2
    assert schedule.bubble_formula(EQUAL).idle == num_ranks - 2


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 4), st.floats(1, 3))
def test_longer_backwards_leave_a_gap_between_rounds(shape: tuple[int, int], multiple: int, backward: float) -> None:
    num_ranks, num_pairs = shape
    costs = Costs(forward=1, backward=backward)
    schedule = create("chimera", num_ranks=num_ranks, num_microbatches=multiple * num_ranks, num_pairs=num_pairs)
    timeline = simulate(schedule.program(), costs)
    assert timeline.makespan - timeline.ideal == pytest.approx(schedule.bubble_formula(costs).idle, abs=1e-9)
    idle = (num_ranks // num_pairs - 2) * (backward + (multiple - 1) * (backward - 1))
    assert schedule.bubble_formula(costs).idle == pytest.approx(idle)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 40))
def test_legal_for_every_number_of_microbatches(shape: tuple[int, int], num_microbatches: int) -> None:
    num_ranks, num_pairs = shape
    schedule = create("chimera", num_ranks=num_ranks, num_microbatches=num_microbatches, num_pairs=num_pairs)
    for steps in (1, 2):
        verify(schedule.program(steps), semantics="rendezvous")
    # Where the pipelines get unequal shares, the slot left free lets one more come in.
    assert max(simulate(schedule.program()).peak_stash) <= num_ranks + (num_microbatches % (2 * num_pairs) > 0)


@pytest.mark.parametrize("num_ranks", [4, 6, 8, 12])
@pytest.mark.parametrize("multiple", [1, 2, 3])
def test_peak_from_half_the_ranks_at_the_ends_to_all_in_the_middle(num_ranks: int, multiple: int) -> None:
    program = create("chimera", num_ranks=num_ranks, num_microbatches=multiple * num_ranks).program()
    half = list(range(num_ranks // 2 + 1, num_ranks + 1))
    assert list(simulate(program).peak_stash) == half + half[::-1]


@pytest.mark.parametrize(("num_ranks", "num_pairs", "lowest"), [(8, 2, 7), (8, 4, 8), (16, 2, 13), (16, 4, 15)])
def test_more_pairs_hold_more_stashes(num_ranks: int, num_pairs: int, lowest: int) -> None:
    """From P - P/2f + 1 to P (Li and Hoefler 2021, section 3)."""
    program = create("chimera", num_ranks=num_ranks, num_microbatches=num_ranks, num_pairs=num_pairs).program()
    peaks = simulate(program).peak_stash
    assert (min(peaks), max(peaks)) == (lowest, num_ranks)


def test_routes_of_two_pairs() -> None:
    placement = create("chimera", num_ranks=8, num_microbatches=8, num_pairs=2).placement
    assert placement.routes == (
        (0, 1, 2, 3, 4, 5, 6, 7),
        (4, 5, 6, 7, 0, 1, 2, 3),
        (7, 6, 5, 4, 3, 2, 1, 0),
        (3, 2, 1, 0, 7, 6, 5, 4),
    )
    assert placement.assignment == (0, 0, 1, 1, 2, 2, 3, 3)
    assert all(len(placement.replicas_of(stage)) == 4 for stage in range(8))


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 30))
def test_ranks_reduce_the_stages_that_they_share_in_one_order(shape: tuple[int, int], num_microbatches: int) -> None:
    """Also those that no microbatch of theirs passes, as long as there is a copy of the stage there."""
    num_ranks, num_pairs = shape
    schedule = create("chimera", num_ranks=num_ranks, num_microbatches=num_microbatches, num_pairs=num_pairs)
    for rank, stream in enumerate(schedule.program(2).streams):
        reductions = [instruction.stage for instruction in stream if isinstance(instruction, ReduceGradient)]
        assert reductions == 2 * sorted(schedule.placement.stages_of(rank), reverse=True)


def test_a_single_microbatch_goes_down() -> None:
    program = create("chimera", num_ranks=4, num_microbatches=1).program()
    computations = [[cell for cell in stream if isinstance(cell, Forward | Backward)] for stream in program.streams]
    assert computations == [[Forward(rank, 0), Backward(rank, 0)] for rank in range(4)]


@pytest.mark.parametrize(
    ("num_ranks", "num_pairs", "message"),
    [
        (5, 1, "chimera needs an even number of ranks: got 5; use 4 or 6"),
        (
            12,
            4,
            "chimera needs a number of pairs that divides half the ranks: got num_pairs=4 on 12 ranks; "
            "use one of 1, 2, 3, 6",
        ),
        (4, 0, "num_pairs is a whole number from 1 up: got 0"),
    ],
)
def test_refusals_say_rule_numbers_and_remedy(num_ranks: int, num_pairs: int, message: str) -> None:
    with pytest.raises(ScheduleError) as refusal:
        create("chimera", num_ranks=num_ranks, num_microbatches=num_ranks, num_pairs=num_pairs)
    assert str(refusal.value) == message
