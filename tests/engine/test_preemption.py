"""Preemption: SIGTERM ends a training after the same step on every rank, and no rank waits for another to find out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import launch_on
from preempted import steps_until_told
from torch.distributed import HashStore

from stagewright.engine.launch.context import context_of, default_transport
from stagewright.engine.preemption import Decisions


@given(
    turns=st.lists(st.integers(0, 2), max_size=40),
    told=st.dictionaries(st.integers(0, 2), st.integers(0, 40), min_size=1),
)
def test_all_ranks_end_after_the_first_step_that_none_had_made_when_one_was_told(
    turns: list[int], told: dict[int, int]
) -> None:
    """Ranks make steps in any order, as far ahead of each other as they like; some are told at some time."""
    store = HashStore()
    decisions = [Decisions(store, "test", tidies=rank == 0) for rank in range(3)]
    num_made = [0, 0, 0]
    last: list[int | None] = [None, None, None]
    expected = None
    for time, rank in enumerate([*turns, *[0, 1, 2] * 100]):
        if last[rank] is None:
            num_made[rank] += 1
            wanted = told.get(rank, 1000) <= time
            if wanted and expected is None:
                # those that have made a step said so; this rank has just made its own and says it now
                expected = max(num_made[rank], *(made + 1 for other, made in enumerate(num_made) if other != rank))
            if decisions[rank].ends_after(num_made[rank], wanted=wanted):
                last[rank] = num_made[rank]
    assert last == [expected] * 3


def test_decisions_do_not_pile_up() -> None:
    store = HashStore()
    decisions = [Decisions(store, "test", tidies=rank == 0) for rank in range(2)]
    for step in range(1000):
        assert not any(of_rank.ends_after(step, wanted=False) for of_rank in decisions)
    assert store.num_keys() == 64


@pytest.mark.parametrize("told", [0, 2])
def test_processes_finish_the_step_in_which_one_of_them_gets_the_signal(told: int) -> None:
    """Or the next one, where another rank had made that one before the signal was noticed."""
    first, *others = launch_on("gloo", steps_until_told, 3, (told, 7))
    assert set(first) <= {7, 8}
    assert others == [first, first]


def test_a_single_rank_needs_no_others() -> None:
    assert steps_until_told(context_of(default_transport()), 0, 3) == [3, 3]


def test_threads_get_no_signals() -> None:
    with pytest.raises(ValueError, match="only processes can be told to end by SIGTERM"):
        launch_on("threads", steps_until_told, 2, (0, 7))
