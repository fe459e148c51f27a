"""What names a stage or microbatch that does not exist, or stands on a rank that does not own the stage."""

import pytest
from programs import BOTH_WAYS, BOTH_WAYS_PLACEMENT, TWO_RANKS, assert_refused, program_of

from stagewright.schedules import Program
from stagewright.schedules.instructions import Backward, Forward, Step
from stagewright.schedules.placement import linear


@pytest.mark.parametrize("token", ["2SEND_F0", "0SEND_F2", "1RECV_B7", "2STEP@1", "5UNSHARD", "9REDUCE_GRAD"])
def test_a_stage_or_microbatch_that_does_not_exist(token: str) -> None:
    program = program_of(TWO_RANKS, ("0STEP@1", f"0STEP@1,{token}"))
    assert_refused(
        program,
        "unknown stage or microbatch",
        f"rank 0: {token} (instruction 9) names a stage or microbatch that does not exist",
        "there are 2 stages and 2 microbatches",
        f"[{token}]",
    )


@pytest.mark.parametrize("instruction", [Forward(-1, 0), Forward(0, -1), Step(-1, 1)])
def test_negative_numbers_name_nothing(instruction: Forward | Step) -> None:
    program = Program(((Forward(0, 0), Backward(0, 0), Step(0, 1), instruction),), linear(1), 1)
    assert_refused(program, "unknown stage or microbatch")


@pytest.mark.parametrize(
    ("moved", "to", "message"),
    [
        ("0F1,", "1F1,", "rank 1: 0F1 (instruction 5) belongs on rank 0, which owns stage 0"),
        ("0SEND_F1,", "1F1,", "rank 1: 0SEND_F1 (instruction 5) belongs on rank 0, which owns stage 0"),
        ("0RECV_B0,", "1F1,", "rank 1: 0RECV_B0 (instruction 5) belongs on rank 0, which owns stage 0"),
        ("0STEP@1", "1STEP@1", "rank 1: 0STEP@1 (instruction 8) belongs on rank 0, which owns stage 0"),
    ],
)
def test_what_another_rank_should_do(moved: str, to: str, message: str) -> None:
    program = program_of(TWO_RANKS, (moved, ""), (to, moved.rstrip(",") + "," + to), placement=linear(2))
    assert_refused(program, "placement", message)


def test_in_a_bidirectional_program_each_microbatch_has_its_own_owner() -> None:
    program = program_of(
        BOTH_WAYS, ("0F0,", "0F1,0SEND_F1,"), ("0F1,1RECV_F0", "1RECV_F0"), placement=BOTH_WAYS_PLACEMENT
    )
    assert_refused(program, "placement", "rank 0: 0F1 (instruction 0) belongs on rank 1")


def test_replicated_stages_are_stepped_by_their_owners_only() -> None:
    program = program_of(
        "0F0,0B0\n0F1,0B1\n1F0,1B0,0STEP@1\n1F1,1B1",
    )
    assert_refused(program, "placement", "rank 2: 0STEP@1 (instruction 2) belongs on rank 0 or 1, which owns stage 0")
