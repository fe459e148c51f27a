"""Which rank owns which stage."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.schedules import Placement, ScheduleError, create, names
from stagewright.schedules.placement import bidirectional, linear, looped, waves


def test_the_four_kinds() -> None:
    assert linear(4).routes == ((0, 1, 2, 3),)
    assert looped(2, 3).routes == ((0, 1, 0, 1, 0, 1),)
    assert waves(3).routes == ((0, 1, 2, 2, 1, 0),)
    assert waves(2, 2).routes == ((0, 1, 1, 0, 0, 1, 1, 0),)
    both = bidirectional(((0, 1), (1, 0)), 6)
    assert both.routes == ((0, 1), (1, 0))
    assert both.assignment == (0, 0, 0, 1, 1, 1)


def test_the_stages_of_a_rank_and_the_ranks_of_a_stage() -> None:
    v = waves(3)
    assert [v.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [v.replicas_of(stage) for stage in range(6)] == [(0,), (1,), (2,), (2,), (1,), (0,)]
    assert (v.num_ranks, v.num_stages, v.num_chunks) == (3, 6, 2)
    both = bidirectional(((0, 1, 2, 3), (3, 2, 1, 0)), 8)
    assert [both.stages_of(rank) for rank in range(4)] == [(0, 3), (1, 2), (1, 2), (0, 3)]
    assert [both.replicas_of(stage) for stage in range(4)] == [(0, 3), (1, 2), (1, 2), (0, 3)]


def test_in_a_bidirectional_placement_the_second_half_of_each_batch_runs_mirrored() -> None:
    both = bidirectional(((0, 1), (1, 0)), 4)
    assert [both.rank_of(0, microbatch) for microbatch in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [both.rank_of(1, microbatch) for microbatch in range(8)] == [1, 1, 0, 0, 1, 1, 0, 0]


@given(st.integers(1, 9), st.integers(1, 5))
def test_chunk_c_of_rank_r_in_a_loop_is_stage_c_times_p_plus_r(num_ranks: int, num_chunks: int) -> None:
    loop = looped(num_ranks, num_chunks)
    for rank in range(num_ranks):
        assert loop.stages_of(rank) == tuple(chunk * num_ranks + rank for chunk in range(num_chunks))


@given(st.integers(1, 9), st.integers(1, 4))
def test_in_waves_neighbouring_stages_are_on_the_same_or_neighbouring_ranks(num_ranks: int, num_waves: int) -> None:
    route = waves(num_ranks, num_waves).routes[0]
    assert len(route) == 2 * num_ranks * num_waves
    assert all(abs(one - other) <= 1 for one, other in pairwise(route))
    assert sorted(route) == sorted(tuple(range(num_ranks)) * 2 * num_waves)


@pytest.mark.parametrize("name", names())
def test_the_placement_of_every_schedule_and_its_inverse_agree(name: str) -> None:
    for num_ranks, num_microbatches in ((1, 2), (2, 4), (4, 8), (6, 12)):
        try:
            placement = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches).placement
        except ScheduleError:
            continue  # a shape that it does not serve
        assert placement.num_ranks == num_ranks
        owned = {(rank, stage) for rank in range(num_ranks) for stage in placement.stages_of(rank)}
        assert owned == {
            (rank, stage) for stage in range(placement.num_stages) for rank in placement.replicas_of(stage)
        }
        for microbatch in range(num_microbatches):
            for stage in range(placement.num_stages):
                assert placement.rank_of(stage, microbatch) in placement.replicas_of(stage)


@pytest.mark.parametrize("routes", [(), ((),), ((0, 1), (0,))])
def test_routes_that_do_not_place_the_same_stages(routes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ScheduleError, match="every route must place the same stages, at least one"):
        Placement(routes)


def test_microbatches_of_routes_that_do_not_exist() -> None:
    with pytest.raises(ScheduleError, match=r"microbatches are assigned to routes 0..1: got \(0, 2\)"):
        Placement(((0, 1), (1, 0)), (0, 2))
