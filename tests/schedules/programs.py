"""Programs written out as text, for the tests that break them."""

from collections.abc import Sequence

import pytest

from stagewright.schedules import Placement, Program, ScheduleError, UpdateRule, verify
from stagewright.schedules.placement import bidirectional
from stagewright.schedules.proof import Semantics

# 1F1B on two ranks, two microbatches.
TWO_RANKS = """
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0STEP@1
1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1STEP@1
"""

# The same with the V placement: rank 0 owns stages 0 and 3, rank 1 owns 1 and 2, which it hands over itself.
V_SHAPED = """
0F0,0SEND_F0,3RECV_F0,3F0,3B0,3SEND_B0,0RECV_B0,0B0,0STEP@1,3STEP@1
1RECV_F0,1F0,2F0,2SEND_F0,2RECV_B0,2I0,1I0,1SEND_B0,2W0,1W0,1STEP@1,2STEP@1
"""

# One microbatch each way, so that both ranks hold both stages.
BOTH_WAYS = """
0F0,0SEND_F0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD,0RECV_B0,0B0,0REDUCE_GRAD,0STEP@1,1STEP@1
0F1,1RECV_F0,0SEND_F1,1F0,1B0,0RECV_B1,1SEND_B0,1REDUCE_GRAD,0B1,0REDUCE_GRAD,0STEP@1,1STEP@1
"""
BOTH_WAYS_PLACEMENT = bidirectional(((0, 1), (1, 0)), 2)

# One rank, an update after every microbatch.
ONE_BY_ONE = "0F0,0B0,0STEP@1,0F1,0B1,0STEP@2,0F2,0B2,0STEP@3"


def program_of(
    text: str,
    *changes: tuple[str, str],
    placement: Placement | None = None,
    num_microbatches: int | None = None,
    rule: UpdateRule | None = None,
) -> Program:
    """Read a program after some replacements in its text, each of which must find its place."""
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} is not in the text once: {text}"
        text = text.replace(old, new)
    lines = [line for line in text.strip().splitlines() if line]
    read = Program.from_csv("\n".join(lines), placement=placement, num_microbatches=num_microbatches)
    return Program(read.streams, read.placement, read.num_microbatches, read.num_batches, rule)


def assert_refused(program: Program, rule: str, *fragments: str, semantics: Semantics = "rendezvous") -> None:
    """``verify`` names this rule, and says these things."""
    with pytest.raises(ScheduleError) as caught:
        verify(program, semantics)
    assert caught.value.rule == rule, str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value), str(caught.value)


def per_update(num_microbatches: int, versions: Sequence[int], staleness: int = 0, buffers: int = 1) -> UpdateRule:
    """An update rule in few words."""
    return UpdateRule(num_microbatches, tuple(versions), staleness, buffers)
