"""The bug diary: each test tells a fault that the library once had."""

import pytest

from stagewright.schedules import Program, ScheduleError, simulate, verify
from stagewright.schedules.placement import linear


def test_a_rank_without_work_was_an_index_error() -> None:
    """The communication pass ran before the proof of what is computed, and put a receive before the first row of an
    empty stream."""
    program = Program.from_csv("0F0,0B0\n,", placement=linear(2))
    with pytest.raises(ScheduleError, match="microbatch 0 has no F on stage 1, which is on rank 1"):
        verify(program)


def test_a_step_that_makes_version_0_waited_for_the_last_reduction() -> None:
    """Version - 1 indexed the reductions from behind."""
    text = """0F0,1F1,1B1,0B0,0REDUCE_GRAD,0STEP@0,0REDUCE_GRAD,1REDUCE_GRAD,1STEP@1
1F0,0F1,0B1,1B0,0REDUCE_GRAD,0STEP@1,1REDUCE_GRAD,1STEP@1,0REDUCE_GRAD"""
    assert simulate(Program.from_csv(text)).makespan == 12


def test_updates_and_versions_were_not_looked_at() -> None:
    """Any STEP was legal, even the seventh version of weights that nobody had updated before."""
    program = Program.from_csv("0F0,0B0,0STEP@7")
    with pytest.raises(ScheduleError, match="0STEP@7 .* should make version 1, the one after version 0"):
        verify(program)


@pytest.mark.parametrize("token", ["0F999999999", "999999999F0"])
def test_a_huge_number_in_a_file_took_all_memory(token: str) -> None:
    """Tables were sized by the highest number before anyone asked whether all those below it occur."""
    with pytest.raises(ScheduleError, match="by their highest numbers, but 3 computations"):
        Program.from_csv(f"0F0,0B0,{token}", placement=linear(1))
