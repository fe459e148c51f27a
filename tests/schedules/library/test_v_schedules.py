"""ZB-V, V-Half and V-Min: peaks and bubbles at F = I = W, and what costs that are not equal make of them."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.schedules import Costs, Timeline, create, simulate

# The most microbatches that a rank may stash, each half of it on either of its two stages.
PEAKS = {"zbv": lambda p: p, "v-half": lambda p: (p + 2) // 2, "v-min": lambda p: (p + 4) // 3}


def run(name: str, num_ranks: int, num_microbatches: int, costs: Costs = Costs()) -> Timeline:  # noqa: B008
    """Simulate a schedule with the costs that it was made for."""
    schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches, costs=costs)
    return simulate(schedule.program(), costs)


def idle(timeline: Timeline) -> float:
    """What a rank idles until all ranks are done."""
    return timeline.makespan - timeline.ideal


def test_rank_r_owns_stage_r_and_its_mirror_image() -> None:
    for name in PEAKS:
        placement = create(name, num_ranks=3, num_microbatches=2).placement
        assert [placement.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_v_min_on_two_ranks() -> None:
    schedule = create("v-min", num_ranks=2, num_microbatches=3)
    assert [" ".join(map(str, schedule.order(rank))) for rank in range(2)] == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 3F2 3I2 0I1 0W1 0I2 3W2 0W2",
        "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2",
    ]


@pytest.mark.parametrize("name", PEAKS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 6, 7, 8, 11, 16])
def test_peaks(name: str, num_ranks: int) -> None:
    for num_microbatches in (1, num_ranks, 3 * num_ranks):
        most = 2 * PEAKS[name](num_ranks)
        peak = max(run(name, num_ranks, num_microbatches).peak_stash)
        assert peak <= min(most, 2 * num_microbatches)
        if num_microbatches == 3 * num_ranks:
            assert peak == most


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8, 13])
def test_no_rank_waits_in_zbv(num_ranks: int) -> None:
    for num_microbatches in range(2 * num_ranks, 3 * num_ranks + 2):
        timeline = run("zbv", num_ranks, num_microbatches)
        assert timeline.span_bubble == 0
        assert idle(timeline) == num_ranks - 1


@pytest.mark.parametrize(
    ("name", "num_microbatches", "makespan"),
    [("zbv", 4, 27), ("zbv", 8, 51), ("v-half", 4, 29), ("v-half", 8, 53), ("v-min", 4, 35), ("v-min", 8, 59)],
)
def test_makespans_of_four_ranks(name: str, num_microbatches: int, makespan: int) -> None:
    assert run(name, 4, num_microbatches).makespan == makespan


@pytest.mark.parametrize(("name", "share"), [("v-half", Fraction(5, 18)), ("v-min", Fraction(11, 18))])
def test_share_of_the_bubble_of_1f1b(name: str, share: Fraction) -> None:
    """At P=4, M=8; a chunk takes half of what a whole stage does."""
    theirs = 2 * idle(simulate(create("1f1b", num_ranks=4, num_microbatches=8).program()))
    assert Fraction(idle(run(name, 4, 8))) / Fraction(theirs) == share


@pytest.mark.parametrize("num_ranks", range(2, 13))
def test_less_memory_than_1f1b_and_less_bubble(num_ranks: int) -> None:
    """Half of the memory for half of the bubble at most, a third of the memory for two thirds."""
    theirs = 6 * (num_ranks - 1)
    assert idle(run("v-half", num_ranks, 3 * num_ranks)) <= theirs / 2
    assert idle(run("v-min", num_ranks, 3 * num_ranks)) <= theirs * 2 / 3


def least_span_of_zbv(num_ranks: int, num_microbatches: int, ratio: tuple[float, float, float]) -> float:
    """The least time from the first rank's start to its end, for M >= 2P, with 2P stash entries a rank.

    The last rank starts (P-1)F late, and has 2P forwards to do until its first gradient arrives (P-1)(I-F) after
    them, if I > F. By its last I it has done all but 2P of its W. That gradient then travels to the first rank.
    """
    forward, inputs, weights = ratio
    hops = num_ranks - 1
    late = hops * forward + hops * max(inputs - forward, 0) - (2 * num_ranks - 1) * weights + hops * inputs
    return 2 * num_microbatches * sum(ratio) + max(late, 0)


# At P=8, M=32: F:I:W, the bubble known of the literature's fixed order, and ours made for these costs.
@pytest.mark.parametrize(
    ("name", "ratio", "known", "aware"),
    [
        ("zbv", (1, 1.3, 0.7), 0.039, 0.0386),
        ("v-half", (1, 1.3, 0.7), 0.119, 0.1123),
        ("v-min", (1, 1.3, 0.7), 0.310, 0.2295),
        ("zbv", (1, 2, 0.5), None, 0.0838),
        ("v-half", (1, 2, 0.5), None, 0.2222),
        ("v-min", (1, 2, 0.5), None, 0.3222),
    ],
)
def test_orders_made_for_the_costs_lose_less(
    name: str, ratio: tuple[float, float, float], known: float | None, aware: float
) -> None:
    costs = Costs(ratio[0], input_gradient=ratio[1], weight_gradient=ratio[2])
    timeline = run(name, 8, 32, costs)
    fixed = simulate(create(name, num_ranks=8, num_microbatches=32).program(), costs)
    assert round(timeline.span_bubble, 4) <= aware < (known or 1)
    assert timeline.span_bubble < fixed.span_bubble
    assert max(timeline.peak_stash) <= max(fixed.peak_stash) == 2 * PEAKS[name](8)
    if name == "zbv":
        assert timeline.span == pytest.approx(least_span_of_zbv(8, 32, ratio))


durations = st.sampled_from((0.25, 0.5, 0.8, 1.0, 1.3, 2.0))


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(PEAKS)),
    num_ranks=st.integers(1, 7),
    num_microbatches=st.integers(1, 16),
    ratio=st.tuples(durations, durations, durations),
    slow=st.sampled_from((1, 1.5)),
    send=st.sampled_from((0.0, 0.3)),
)
def test_never_slower_than_the_order_for_equal_costs(
    name: str, num_ranks: int, num_microbatches: int, ratio: tuple[float, float, float], slow: float, send: float
) -> None:
    """``program()`` proves each order legal: no microbatch, and no weight gradient, is forgotten or done twice."""
    kinds = [[duration * (slow if stage == 1 else 1) for stage in range(2 * num_ranks)] for duration in ratio]
    costs = Costs(kinds[0], input_gradient=kinds[1], weight_gradient=kinds[2], send=send)
    timeline = run(name, num_ranks, num_microbatches, costs)
    fixed = simulate(create(name, num_ranks=num_ranks, num_microbatches=num_microbatches).program(), costs)
    assert timeline.span <= fixed.span + 1e-9
    assert max(timeline.peak_stash) <= 2 * PEAKS[name](num_ranks)
    if name == "zbv" and slow == 1 and send == 0 and num_microbatches >= 2 * num_ranks:
        assert timeline.span >= least_span_of_zbv(num_ranks, num_microbatches, ratio) - 1e-9


def test_the_formula_of_zbv() -> None:
    schedule = create("zbv", num_ranks=5, num_microbatches=12)
    formula = schedule.bubble_formula(Costs())
    assert formula is not None
    assert formula.agrees_with(simulate(schedule.program()))
    assert schedule.bubble_formula(Costs(forward=2)) is None
    assert create("zbv", num_ranks=5, num_microbatches=9).bubble_formula(Costs()) is None
