"""ZB-H1, ZB-H2 and their interleaved form: odd shapes, and what an optimizer barrier makes of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.schedules import create, simulate


def orders(name: str, num_ranks: int, num_microbatches: int, **options: object) -> list[str]:
    schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    return [" ".join(map(str, schedule.order(rank))) for rank in range(num_ranks)]


def test_zb_h1_with_few_microbatches() -> None:
    assert orders("zb-h1", 3, 2) == [
        "0F0 0F1 0I0 0W0 0I1 0W1",
        "1F0 1F1 1I0 1I1 1W0 1W1",
        "2F0 2I0 2F1 2I1 2W0 2W1",
    ]


def test_zb_h2_with_few_microbatches() -> None:
    assert orders("zb-h2", 3, 2) == [
        "0F0 0F1 0I0 0W0 0I1 0W1",
        "1F0 1F1 1I0 1W0 1I1 1W1",
        "2F0 2I0 2F1 2I1 2W0 2W1",
    ]


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "interleaved-zb", "gis"])
def test_one_rank_splits_and_joins(name: str) -> None:
    assert orders(name, 1, 2, **({"num_chunks": 1} if name in ("interleaved-zb", "gis") else {})) == [
        "0F0 0I0 0W0 0F1 0I1 0W1"
    ]


def test_a_barrier_brings_the_bubble_back() -> None:
    """Each rank of ZB-H2 is busy from first to last, yet the step takes 3M + P - 1 like ZB-H1's."""
    h1 = simulate(create("zb-h1", num_ranks=4, num_microbatches=8).program())
    h2 = simulate(create("zb-h2", num_ranks=4, num_microbatches=8).program())
    assert (h1.makespan, h2.makespan) == (27, 27)
    assert (h1.span, h2.span) == (27, 24)
    assert h2.span_bubble == 0 < h2.bubble_fraction == 1 / 9


@settings(max_examples=60, deadline=None)
@given(num_ranks=st.integers(1, 8), num_microbatches=st.integers(1, 20), num_chunks=st.integers(1, 4))
def test_splitting_never_costs_time_or_memory(num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    """Interleaved-zb is at least as fast as interleaved, and its fullest rank stashes no more."""
    shape = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    whole, split = (simulate(create(name, **shape).program()) for name in ("interleaved", "interleaved-zb"))
    assert split.makespan <= whole.makespan
    assert max(split.peak_stash) <= max(whole.peak_stash)
