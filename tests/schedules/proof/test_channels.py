"""One receive for every send, in the same order on each channel (source, destination, direction)."""

import pytest
from programs import TWO_RANKS, V_SHAPED, assert_refused, program_of

from stagewright.schedules import verify
from stagewright.schedules.proof import SEMANTICS, Semantics


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_a_channel_read_in_another_order_than_it_is_written(semantics: Semantics) -> None:
    program = program_of(TWO_RANKS, ("1RECV_F0,1F0,1RECV_F1", "1RECV_F1,1RECV_F0,1F0"))
    assert_refused(
        program,
        "channel order",
        "rank 1: 1RECV_F1 (instruction 0) comes before rank 1: 1RECV_F0 (instruction 1), but "
        "rank 0: 0SEND_F0 (instruction 1) before rank 0: 0SEND_F1 (instruction 3)",
        semantics=semantics,
    )


def test_the_two_directions_between_two_ranks_are_two_channels() -> None:
    """In a V, activations and gradients go both ways between two ranks; only within a direction is there an order."""
    text = """
0F0,0SEND_F0,0RECV_B0,3RECV_F0,3F0,3B0,3SEND_B0,0B0,0STEP@1,3STEP@1
1RECV_F0,1F0,2F0,2SEND_F0,2RECV_B0,2B0,1B0,1SEND_B0,1STEP@1,2STEP@1
"""
    verify(program_of(text))


def test_gradients_have_an_order_as_well() -> None:
    program = program_of(TWO_RANKS, ("0RECV_B0,0B0,0RECV_B1", "0RECV_B1,0RECV_B0,0B0"))
    assert_refused(program, "channel order", "rank 0: 0RECV_B1 (instruction 4) comes before rank 0: 0RECV_B0")


@pytest.mark.parametrize(
    ("text", "changes", "rule", "message"),
    [
        (TWO_RANKS, [("0SEND_F1,", "")], "receive without send", "nobody sends what rank 1: 1RECV_F1 (instruction 2)"),
        (TWO_RANKS, [("1SEND_B1,", "")], "receive without send", "nobody sends what rank 0: 0RECV_B1 (instruction 6)"),
        (TWO_RANKS, [("0F0,", "0RECV_F0,0F0,")], "receive without send", "nobody sends what rank 0: 0RECV_F0"),
        (TWO_RANKS, [("1F1,", "1F1,1RECV_B0,")], "receive without send", "nobody sends what rank 1: 1RECV_B0"),
        (TWO_RANKS, [("1F1,", "1F1,1SEND_F0,")], "send without receive", "nobody receives rank 1: 1SEND_F0"),
        (TWO_RANKS, [("0B0,", "0B0,0SEND_B0,")], "send without receive", "nobody receives rank 0: 0SEND_B0"),
        (
            TWO_RANKS,
            [("0SEND_F1,", "0SEND_F1,0SEND_F1,")],
            "duplicate message",
            "0SEND_F1 (instruction 4) stands there a",
        ),
        (
            TWO_RANKS,
            [("1RECV_F1,", "1RECV_F1,1RECV_F1,")],
            "duplicate message",
            "1RECV_F1 (instruction 3) stands there a",
        ),
        (V_SHAPED, [("1F0,2F0", "1F0,1SEND_F0,2F0")], "send without receive", "nobody receives rank 1: 1SEND_F0"),
        (
            V_SHAPED,
            [("1F0,2F0", "1F0,1SEND_F0,2RECV_F0,2F0")],
            "placement",
            "1SEND_F0 (instruction 2) stays on its rank",
        ),
    ],
)
def test_sends_and_receives_without_each_other(
    text: str, changes: list[tuple[str, str]], rule: str, message: str
) -> None:
    assert_refused(program_of(text, *changes), rule, message)
