"""Every microbatch once through every stage, forward and backward."""

import pytest
from programs import TWO_RANKS, V_SHAPED, assert_refused, program_of

from stagewright.schedules import Program, create
from stagewright.schedules.placement import linear, waves


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("0B1", "0B1,0B1")], "rank 0: 0B1 (instruction 8) does again what rank 0: 0B1 (instruction 7) did"),
        ([("1F1", "1F0")], "rank 1: 1F0 (instruction 5) does again what rank 1: 1F0 (instruction 1) did"),
        ([("0B1", "0I1,0B1")], "rank 0: 0B1 (instruction 8) does again what rank 0: 0I1 (instruction 7) did"),
        ([("0B1", "0B1,0W1")], "rank 0: 0W1 (instruction 8) does again what rank 0: 0B1 (instruction 7) did"),
        ([("0B1", "0W1,0B1")], "rank 0: 0B1 (instruction 8) does again what rank 0: 0W1 (instruction 7) did"),
    ],
)
def test_what_is_computed_twice(changes: list[tuple[str, str]], message: str) -> None:
    assert_refused(program_of(TWO_RANKS, *changes), "duplicate compute", message)


@pytest.mark.parametrize(
    ("changes", "message", "drawn"),
    [
        ([("1F1,", "")], "microbatch 1 has no F on stage 1, which is on rank 1", "[1F1?]"),
        ([("0B0,", "")], "microbatch 0 has no B or I on stage 0, which is on rank 0", "[0B0?]"),
        ([("0B1", "0W1")], "microbatch 1 has no B or I on stage 0, which is on rank 0", "[0I1?]"),
        ([("0B1", "0I1")], "microbatch 1 has no B or W on stage 0, which is on rank 0", "[0W1?]"),
    ],
)
def test_what_is_never_computed(changes: list[tuple[str, str]], message: str, drawn: str) -> None:
    assert_refused(program_of(TWO_RANKS, *changes, placement=linear(2)), "missing compute", message, drawn)


def test_a_stash_that_no_weight_gradient_pops() -> None:
    program = program_of(V_SHAPED, ("2W0,", ""), placement=waves(2))
    assert_refused(program, "missing compute", "microbatch 0 has no B or W on stage 2")


def test_the_peer_fault_of_a_last_rank_that_never_forwards_microbatch_0() -> None:
    """A peer's order was wrong on the last rank, and no test noticed."""
    whole = create("1f1b", num_ranks=4, num_microbatches=8).program()
    last = tuple(instruction for instruction in whole.streams[3] if str(instruction) != "3F0")
    program = Program((*whole.streams[:3], last), whole.placement, 8)
    assert_refused(program, "missing compute", "microbatch 0 has no F on stage 3, which is on rank 3")


def test_the_peer_fault_of_duplicates_that_no_validator_saw() -> None:
    program = program_of("0F0,0F0,0B0,0B0\n1F0,1B0", placement=linear(2))
    assert_refused(program, "duplicate compute", "rank 0: 0F0 (instruction 1) does again")
