"""Sharded parameters are gathered while a stage computes, and freed in the end."""

import pytest
from programs import TWO_RANKS, assert_refused, program_of

from stagewright.schedules import verify

SHARDED = TWO_RANKS.replace("0F0,", "0UNSHARD,0F0,").replace("0STEP@1", "0STEP@1,0RESHARD")


def test_gathered_while_it_computes() -> None:
    verify(program_of(SHARDED))
    verify(program_of(SHARDED, ("0RECV_B0,", "0RESHARD,0RECV_B0,0UNSHARD,")))
    verify(program_of(SHARDED, ("0B1,", "0B1,0RESHARD,"), ("0STEP@1,0RESHARD", "0STEP@1")))


@pytest.mark.parametrize(
    ("changes", "rule", "message"),
    [
        (
            [("0UNSHARD,0F0,", "0F0,0UNSHARD,")],
            "sharding",
            "rank 0: 0F0 (instruction 0) computes with the parameters of",
        ),
        (
            [("0F1,", "0RESHARD,0F1,0UNSHARD,")],
            "sharding",
            "rank 0: 0F1 (instruction 4) computes with the parameters of",
        ),
        ([("0F1,", "0UNSHARD,0F1,")], "sharding", "rank 0: 0UNSHARD (instruction 3) gathers what rank 0: 0UNSHARD"),
        (
            [("0RESHARD", "0RESHARD,0RESHARD")],
            "sharding",
            "rank 0: 0RESHARD (instruction 11) frees what is not gathered",
        ),
        ([("0UNSHARD,", "")], "sharding", "rank 0: 0F0 (instruction 0) computes with the parameters of"),
        ([(",0RESHARD", "")], "leftover", "what rank 0: 0UNSHARD (instruction 0) gathers is never freed"),
    ],
)
def test_what_is_not_gathered_or_never_freed(changes: list[tuple[str, str]], rule: str, message: str) -> None:
    assert_refused(program_of(SHARDED, *changes), rule, message)
