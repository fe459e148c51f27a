"""Gradients are summed once they are complete and before they are applied."""

import pytest
from programs import BOTH_WAYS, BOTH_WAYS_PLACEMENT, TWO_RANKS, assert_refused, per_update, program_of

from stagewright.schedules import Program, verify

REDUCED = TWO_RANKS.replace("0STEP@1", "0REDUCE_GRAD,0STEP@1")
TIED = TWO_RANKS.replace("0STEP@1", "0REDUCE_TIED,0STEP@1").replace("1STEP@1", "1REDUCE_TIED,1STEP@1")
AGREED = TWO_RANKS.replace("0STEP@1", "SYNC_SCALARS,0STEP@1").replace("1STEP@1", "SYNC_SCALARS,1STEP@1")


def both_ways(*changes: tuple[str, str]) -> Program:
    first, second = BOTH_WAYS.strip().splitlines()
    for old, new in changes:
        assert old in second
        second = second.replace(old, new)
    return program_of(first + "\n" + second, placement=BOTH_WAYS_PLACEMENT)


def test_each_kind_of_reduction_in_its_place_is_legal() -> None:
    for text in (REDUCED, TIED, AGREED):
        verify(program_of(text))
    verify(both_ways())
    for token in ("0REDUCE_GRAD", "0REDUCE_TIED", "SYNC_SCALARS"):
        text = f"0F0,0B0,{token},0STEP@1,0F1,0B1,{token},0STEP@2"
        verify(program_of(text, num_microbatches=1))


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (
            REDUCED,
            [("0B1,0REDUCE_GRAD", "0REDUCE_GRAD,0B1")],
            "0REDUCE_GRAD (instruction 7), for version 1, comes before",
        ),
        (TIED, [("0B1,0REDUCE_TIED", "0REDUCE_TIED,0B1")], "0REDUCE_TIED (instruction 7), for version 1, comes before"),
        (
            AGREED,
            [("1B1,1SEND_B1,SYNC_SCALARS", "SYNC_SCALARS,1B1,1SEND_B1")],
            "rank 1: SYNC_SCALARS (instruction 6), for",
        ),
        (REDUCED, [("0REDUCE_GRAD", "0REDUCE_GRAD,0REDUCE_GRAD")], "0REDUCE_GRAD (instruction 9) has nothing to sum"),
    ],
)
def test_too_early_or_once_too_often(text: str, changes: list[tuple[str, str]], message: str) -> None:
    rule = "leftover" if "nothing" in message else "reduction too early"
    assert_refused(program_of(text, *changes), rule, message)


def test_a_reduction_sums_the_gradients_of_its_own_update_only() -> None:
    text = "0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD,0STEP@1,0F1,0B1,0STEP@2"
    assert_refused(
        program_of(text, num_microbatches=1),
        "reduction too early",
        "0REDUCE_GRAD (instruction 3), for version 2, comes before rank 0: 0B1 (instruction 6)",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("0REDUCE_GRAD,", "")], "rank 1: 0STEP@1 (instruction 9) has no REDUCE_GRAD before it"),
        (
            [("0REDUCE_GRAD,0STEP@1", "0STEP@1,0REDUCE_GRAD")],
            "rank 1: 0STEP@1 (instruction 9) has no REDUCE_GRAD before",
        ),
    ],
)
def test_a_replicated_stage_is_reduced_before_every_step(changes: list[tuple[str, str]], message: str) -> None:
    assert_refused(both_ways(*changes), "reduction missing", message)


@pytest.mark.parametrize("token", ["0REDUCE_GRAD", "0REDUCE_TIED", "SYNC_SCALARS"])
def test_what_is_reduced_once_is_reduced_every_time(token: str) -> None:
    text = f"0F0,0B0,{token},0STEP@1,0F1,0B1,0STEP@2"
    message = f"0STEP@2 (instruction 6) has no {token.lstrip('0')} before it"
    assert_refused(program_of(text, num_microbatches=1), "reduction missing", message)


def test_every_rank_takes_part_in_the_scalars() -> None:
    text = TWO_RANKS.replace("0STEP@1", "SYNC_SCALARS,0STEP@1")
    assert_refused(
        program_of(text), "reduction missing", "rank 1: 1STEP@1 (instruction 8) has no SYNC_SCALARS before it"
    )


def test_the_norm_is_that_of_the_summed_gradients() -> None:
    text = REDUCED.replace("0REDUCE_GRAD", "SYNC_SCALARS,0REDUCE_GRAD").replace("1STEP@1", "SYNC_SCALARS,1STEP@1")
    assert_refused(program_of(text), "reduction too early", "SYNC_SCALARS (instruction 8), for version 1, comes before")


def test_two_updates_may_be_under_way_with_two_buffers() -> None:
    text = "0F0@0,0B0@0,0REDUCE_GRAD,0F1@0,0B1@0,0REDUCE_GRAD,0STEP@1,0STEP@2"
    verify(program_of(text, num_microbatches=1, rule=per_update(1, [2], staleness=1, buffers=2)))
