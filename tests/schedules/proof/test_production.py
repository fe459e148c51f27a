"""What an instruction needs stands before it in its rank's stream."""

import pytest
from programs import TWO_RANKS, V_SHAPED, assert_refused, program_of

from stagewright.schedules import Program, create


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (
            TWO_RANKS,
            [("0F0,0SEND_F0", "0SEND_F0,0F0")],
            "0SEND_F0 (instruction 0) runs before what it needs, rank 0: 0F0",
        ),
        (
            TWO_RANKS,
            [("0RECV_B0,0B0", "0B0,0RECV_B0")],
            "0B0 (instruction 4) runs before what it needs, rank 0: 0RECV_B0",
        ),
        (
            TWO_RANKS,
            [("1RECV_F0,1F0", "1F0,1RECV_F0")],
            "1F0 (instruction 0) runs before what it needs, rank 1: 1RECV_F0",
        ),
        (
            TWO_RANKS,
            [("1B0,1SEND_B0", "1SEND_B0,1B0")],
            "1SEND_B0 (instruction 3) runs before what it needs, rank 1: 1B0",
        ),
        (TWO_RANKS, [("1RECV_F0,", "")], "the input of rank 1: 1F0 (instruction 0) is never received"),
        (TWO_RANKS, [("0RECV_B1,", "")], "the input of rank 0: 0B1 (instruction 6) is never received"),
        (TWO_RANKS, [("1F1,1B1", "1B1,1F1")], "1B1 (instruction 5) runs before what it needs, rank 1: 1F1"),
        (V_SHAPED, [("1F0,2F0", "2F0,1F0")], "2F0 (instruction 1) runs before what it needs, rank 1: 1F0"),
        (V_SHAPED, [("2I0,1I0", "1I0,2I0")], "1I0 (instruction 5) runs before what it needs, rank 1: 2I0"),
        (V_SHAPED, [("2I0,", ""), ("2W0,", "2W0,2I0,")], "1I0 (instruction 5) runs before what it needs, rank 1: 2I0"),
        (
            V_SHAPED,
            [("1I0,", ""), ("1SEND_B0,", ""), ("1W0,", "1W0,1I0,1SEND_B0,")],
            "rank 1: 1W0 (instruction 7) runs before",
        ),
    ],
)
def test_what_comes_too_early(text: str, changes: list[tuple[str, str]], message: str) -> None:
    assert_refused(program_of(text, *changes), "use before production", message)


def test_a_fused_pair_cannot_hold_a_backward_and_the_forward_it_needs() -> None:
    program = program_of(TWO_RANKS, ("1F1,1B1", "(1F1;1B1)OVERLAP_F_B"))
    message = "rank 1: (1F1;1B1)OVERLAP_F_B (instruction 5) fuses a backward with the forward that it needs"
    assert_refused(program, "use before production", message)


def test_without_communication_what_stays_on_a_rank_is_in_order_too() -> None:
    assert_refused(program_of("0F0,0B0,3F0,3B0\n1F0,2F0,2B0,1B0"), "circular wait")
    assert_refused(
        program_of("0F0,3F0,3B0,0B0\n2F0,1F0,2B0,1B0"), "use before production", "2F0 (instruction 0) runs before"
    )


def test_the_peer_fault_of_a_receive_that_never_comes() -> None:
    whole = create("1f1b", num_ranks=3, num_microbatches=3).program()
    streams = [tuple(i for i in stream if str(i) != "1SEND_F2") for stream in whole.streams]
    assert_refused(Program(tuple(streams), whole.placement, 3), "receive without send", "2RECV_F2")


def test_the_grid_shows_both_places() -> None:
    program = program_of(TWO_RANKS, ("1RECV_F0,1F0", "1F0,1RECV_F0"))
    grid = """
  rank 0 | 0F0    0SEND_F0    0F1       0SEND_F1  …
  rank 1 | [1F0]  [1RECV_F0]  1RECV_F1  1B0       …"""
    assert_refused(program, "use before production", grid)
