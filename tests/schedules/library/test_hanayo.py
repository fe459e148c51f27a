"""Hanayo: the published bound of the bubble, the best that is possible at M = P, and any other shape."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.schedules import Costs, ScheduleError, create, simulate, verify
from stagewright.schedules.instructions import SendActivation, SendGradient

TWICE = Costs(forward=1, backward=2)


@pytest.mark.parametrize("num_waves", [1, 2, 3, 4])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 6, 7, 8, 16, 32])
def test_published_bound(num_ranks: int, num_waves: int) -> None:
    """Bubble fraction at most (2P-2)/(3Pw+P-1) for M = P and B = 2F (Liu et al. 2023)."""
    schedule = create("hanayo", num_ranks=num_ranks, num_microbatches=num_ranks, num_waves=num_waves)
    bound = (2 * num_ranks - 2) / (3 * num_ranks * num_waves + num_ranks - 1)
    assert simulate(schedule.program(), TWICE).bubble_fraction <= bound


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 10), st.integers(1, 4), st.floats(1, 3))
def test_no_order_can_idle_less(num_ranks: int, num_waves: int, backward: float) -> None:
    """The last rank has to wait for 2(P-1)B, whatever its order, and we need no more: M = P and B >= F."""
    costs = Costs(forward=1, backward=backward)
    schedule = create("hanayo", num_ranks=num_ranks, num_microbatches=num_ranks, num_waves=num_waves)
    timeline = simulate(schedule.program(), costs)
    assert timeline.makespan - timeline.ideal == pytest.approx(2 * (num_ranks - 1) * backward, abs=1e-9)
    assert timeline.makespan - timeline.ideal == pytest.approx(schedule.bubble_formula(costs).idle, abs=1e-9)
    assert timeline.bubble_fraction == pytest.approx(schedule.bubble_formula(costs).fraction, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 25))
def test_legal_for_every_shape(num_ranks: int, num_waves: int, num_microbatches: int) -> None:
    schedule = create("hanayo", num_ranks=num_ranks, num_microbatches=num_microbatches, num_waves=num_waves)
    assert schedule.num_stages == schedule.placement.num_stages == 2 * num_ranks * num_waves
    for steps in (1, 2):
        verify(schedule.program(steps), semantics="rendezvous")
    peaks = simulate(schedule.program()).peak_stash
    assert max(peaks) <= 2 * num_waves * min(num_microbatches, 2 * num_ranks)


@pytest.mark.parametrize("num_groups", [2, 3, 5])
@pytest.mark.parametrize("num_waves", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_more_groups_cost_hardly_more_time_or_memory(num_ranks: int, num_waves: int, num_groups: int) -> None:
    """From group to group nothing is lost: the bubble stays within a quarter of that of one group."""
    num_microbatches = num_groups * num_ranks
    program = create("hanayo", num_ranks=num_ranks, num_microbatches=num_microbatches, num_waves=num_waves).program()
    timeline = simulate(program, TWICE)
    assert timeline.makespan - timeline.ideal <= 1.25 * 4 * (num_ranks - 1)
    assert max(timeline.peak_stash) <= 1.25 * 2 * num_waves * num_ranks


def test_stages_run_down_and_up() -> None:
    placement = create("hanayo", num_ranks=3, num_microbatches=3, num_waves=2).placement
    assert placement.routes == ((0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0),)


def test_nothing_is_sent_where_stages_turn_round() -> None:
    """Stages 1 and 2 of two ranks are both on the last one."""
    program = create("hanayo", num_ranks=2, num_microbatches=1).program()
    sent = [
        [str(item) for item in stream if isinstance(item, SendActivation | SendGradient)] for stream in program.streams
    ]
    assert sent == [["0SEND_F0", "3SEND_B0"], ["2SEND_F0", "1SEND_B0"]]


def test_waves_are_counted_from_one() -> None:
    with pytest.raises(ScheduleError, match=r"^num_waves is a whole number from 1 up: got 0$"):
        create("hanayo", num_ranks=2, num_microbatches=2, num_waves=0)
