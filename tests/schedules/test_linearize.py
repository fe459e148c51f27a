"""One order in which all ranks can run, or where they are stuck."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import BOTH_WAYS, BOTH_WAYS_PLACEMENT, TWO_RANKS, program_of

from stagewright.schedules import Program, ScheduleError, create, names
from stagewright.schedules.linearize import Stuck, linearize, waits_of


def tokens(program: Program, rows: list[int]) -> list[str]:
    table = program.table
    return [str(program.streams[table.rank[row]][table.position[row]]) for row in rows]


def waits_for(program: Program, token: str, *, rendezvous: bool = False) -> list[str]:
    """What an instruction that occurs once waits for on other ranks."""
    table = program.table
    (row,) = (row for row in range(len(table)) if tokens(program, [row]) == [token])
    return tokens(program, waits_of(table, rendezvous=rendezvous).of(row))


def test_who_waits_for_whom() -> None:
    program = program_of(TWO_RANKS)
    assert waits_for(program, "1F0") == ["0SEND_F0"]
    assert waits_for(program, "0B1") == ["1SEND_B1"]
    assert waits_for(program, "0F0") == []
    assert waits_for(program, "0SEND_F0") == []
    assert waits_for(program, "0RECV_B0") == []
    assert waits_for(program, "0SEND_F0", rendezvous=True) == ["1RECV_F0"]
    assert waits_for(program, "1SEND_B1", rendezvous=True) == ["0RECV_B1"]


def test_without_communication_computations_wait_for_each_other() -> None:
    program = program_of("0F0,0B0\n1F0,1I0,1W0")
    assert waits_for(program, "1F0") == ["0F0"]
    assert waits_for(program, "0B0") == ["1I0"]


def test_a_fused_pair_waits_for_both_of_its_inputs() -> None:
    program = program_of("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1")
    table = program.table
    assert tokens(program, waits_of(table).of(1)) == ["1B0"]


def test_steps_wait_for_the_reductions_of_other_replicas_and_of_tied_stages() -> None:
    program = program_of(BOTH_WAYS, placement=BOTH_WAYS_PLACEMENT)
    table = program.table
    steps = [row for row in range(len(table)) if tokens(program, [row])[0].startswith("0STEP")]
    assert [[(table.rank[other], *tokens(program, [other])) for other in waits_of(table).of(row)] for row in steps] == [
        [(1, "0REDUCE_GRAD")],
        [(0, "0REDUCE_GRAD")],
    ]
    tied = program_of(TWO_RANKS, ("0STEP@1", "0REDUCE_TIED,0STEP@1"), ("1STEP@1", "1REDUCE_TIED,1STEP@1"))
    assert waits_for(tied, "0STEP@1") == ["1REDUCE_TIED"]
    assert waits_for(tied, "1STEP@1") == ["0REDUCE_TIED"]


def test_a_step_waits_for_the_scalars_of_all_ranks_and_they_for_nobody() -> None:
    program = program_of(TWO_RANKS, ("0STEP@1", "SYNC_SCALARS,0STEP@1"), ("1STEP@1", "SYNC_SCALARS,1STEP@1"))
    assert waits_for(program, "0STEP@1") == waits_for(program, "1STEP@1") == ["SYNC_SCALARS"]
    table = program.table
    syncs = [row for row in range(len(table)) if tokens(program, [row]) == ["SYNC_SCALARS"]]
    assert [waits_of(table).of(row) for row in syncs] == [[], []]


def assert_possible(program: Program, *, rendezvous: bool) -> None:
    """Every row once, each after its rank's earlier rows and after all that it waits for."""
    table = program.table
    waits = waits_of(table, rendezvous=rendezvous)
    order = linearize(table, waits)
    assert not isinstance(order, Stuck)
    assert sorted(order) == list(range(len(table)))
    turn = {row: index for index, row in enumerate(order)}
    for row in range(len(table)):
        assert row in table.first_row or turn[row - 1] < turn[row]
        assert all(turn[other] < turn[row] for other in waits.of(row))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(names()), st.integers(1, 6), st.integers(1, 12), st.integers(1, 2), st.booleans())
def test_the_order_of_every_schedule_is_possible(
    name: str, num_ranks: int, num_microbatches: int, steps: int, rendezvous: bool
) -> None:
    try:
        schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    except ScheduleError:
        return  # a shape that it does not serve
    assert_possible(schedule.program(steps), rendezvous=rendezvous)


@pytest.mark.parametrize("rendezvous", [False, True])
def test_where_each_rank_is_stuck(rendezvous: bool) -> None:
    text = """
0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1,0STEP@1
1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1STEP@1
"""
    program = program_of(text)
    stuck = linearize(program.table, waits_of(program.table, rendezvous=rendezvous))
    assert isinstance(stuck, Stuck)
    assert tokens(program, list(stuck.blocked.values())) == ["0B0", "1F1"]
    assert list(stuck.blocked) == [0, 1]
