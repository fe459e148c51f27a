"""STEPs make versions 1, 2, 3, …"""

import pytest
from programs import ONE_BY_ONE, TWO_RANKS, assert_refused, per_update, program_of


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("0STEP@1", "0STEP@0")], "rank 0: 0STEP@0 (instruction 2) should make version 1, the one after version 0"),
        ([("0STEP@1", "0STEP@2")], "rank 0: 0STEP@2 (instruction 2) should make version 1"),
        ([("0STEP@2", "0STEP@1")], "rank 0: 0STEP@1 (instruction 5) should make version 2, the one after version 1"),
        ([("0STEP@2,", "")], "rank 0: 0STEP@3 (instruction 7) should make version 2"),
        ([("0STEP@2", "0STEP@2,0STEP@2")], "rank 0: 0STEP@2 (instruction 6) should make version 3"),
    ],
)
def test_versions_count_up_by_one(changes: list[tuple[str, str]], message: str) -> None:
    program = program_of(ONE_BY_ONE, *changes, num_microbatches=1, rule=per_update(1, [1]))
    assert_refused(program, "step order", message)


def test_each_rank_counts_its_own() -> None:
    assert_refused(program_of(TWO_RANKS, ("1STEP@1", "1STEP@2")), "step order", "rank 1: 1STEP@2", "[1STEP@2]")
