"""Who keeps a pipeline waiting: never a rank that only waits for another."""

import pytest

from stagewright.engine.control.progress import REPLICAS, Place
from stagewright.engine.control.silence import Answer, judge

TIMEOUT = 30.0
NAMES = {rank: f"rank {rank}" for rank in range(4)}


def answer(awaited: int | None, idle_seconds: float = 40.0, instruction: str = "1B3") -> Answer:
    return Answer(Place(7, instruction), awaited, idle_seconds)


def verdict(waiting: int, answers: dict[int, Answer], silent: dict[int, Place] | None = None) -> str | None:
    found = judge(waiting, answers, silent or {}, TIMEOUT, NAMES)
    return None if found is None else found.reason


def test_a_rank_that_does_not_answer_is_at_fault_and_not_the_neighbour_that_waits_for_it() -> None:
    answers = {0: answer(1), 1: answer(2), 3: answer(2)}
    expected = "rank 2 does not answer; its last instruction was 2F4 (step 7)"
    for waiting in answers:
        assert verdict(waiting, answers, {2: Place(7, "2F4")}) == expected


def test_several_ranks_that_do_not_answer_are_all_named() -> None:
    assert verdict(0, {0: answer(1), 1: answer(2)}, {3: Place(), 2: Place(6)}) == (
        "rank 2 does not answer; it had ended step 6; rank 3 does not answer; it had not begun its first step"
    )


def test_the_rank_at_the_end_of_the_chain_is_at_fault_if_it_has_stood_still() -> None:
    answers = {0: answer(1), 1: answer(2), 2: answer(3), 3: answer(None, instruction="3F0")}
    for waiting in (0, 1, 2):
        assert verdict(waiting, answers) == "rank 3 does not go on; for 40 s it has been at 3F0 (step 7)"


def test_a_rank_that_goes_on_slowly_is_not_at_fault() -> None:
    """The ranks behind it wait for longer than the time-out while the pipeline fills."""
    assert verdict(0, {0: answer(1), 1: answer(2), 2: answer(None, idle_seconds=3.0)}) is None


def test_ranks_that_wait_for_each_other_are_all_named_with_their_places() -> None:
    answers = {0: answer(1, instruction="0B4"), 1: answer(0, instruction="1F5"), 2: answer(1)}
    expected = "ranks wait for each other: rank 0 at 0B4 (step 7), rank 1 at 1F5 (step 7); all make the same calls"
    for waiting in answers:
        assert str(verdict(waiting, answers)).startswith(expected)


def test_answers_of_different_moments_make_no_circle() -> None:
    assert verdict(0, {0: answer(1), 1: answer(0, idle_seconds=0.1)}) is None


@pytest.mark.parametrize(("idle_seconds", "blamed"), [(32.0, False), (36.0, True)])
def test_a_rank_that_waits_for_another_replica_gives_that_time_to_say_why(idle_seconds: float, blamed: bool) -> None:
    said = verdict(0, {0: answer(1), 1: answer(REPLICAS, idle_seconds, "1REDUCE_GRAD")})
    assert said == ("rank 1 waits for another replica at 1REDUCE_GRAD (step 7)" if blamed else None)
