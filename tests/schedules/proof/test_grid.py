"""The picture in a refusal."""

from programs import TWO_RANKS, program_of

from stagewright.schedules import Program, create
from stagewright.schedules.instructions import Backward, Forward, Step
from stagewright.schedules.placement import linear
from stagewright.schedules.proof.grid import Missing, grid_around


def row_of(program: Program, rank: int, token: str) -> int:
    """The row of a token that occurs once on a rank."""
    table = program.table
    rows = range(table.first_row[rank], table.first_row[rank + 1])
    return next(row for row in rows if str(program.streams[rank][table.position[row]]) == token)


def test_ranks_are_centred_on_what_concerns_the_same_microbatch() -> None:
    program = create("1f1b", num_ranks=4, num_microbatches=8).program()
    cells = [line.split("|")[1].split() for line in grid_around(program, [row_of(program, 1, "1B3")]).splitlines()]
    assert [row[4] for row in cells] == ["0B3", "[1B3]", "2B3", "3B3"]
    assert [row[0] for row in cells] == [row[-1] for row in cells] == ["…"] * 4


def test_a_stream_that_ends_within_the_window_has_no_dots() -> None:
    program = program_of(TWO_RANKS)
    assert grid_around(program, [row_of(program, 0, "0STEP@1")]) == (
        "  rank 0 | …  0B0  0RECV_B1  0B1       [0STEP@1]\n"  #
        "  rank 1 | …  1F1  1B1       1SEND_B1  1STEP@1"
    )


def test_two_marks_far_apart_on_one_rank_take_two_lines() -> None:
    stream = (*(Forward(0, m) for m in range(9)), *(Backward(0, m) for m in range(9)), Step(0, 1))
    program = Program((stream,), linear(1), 9)
    assert grid_around(program, [2, 17]) == (
        "  rank 0 |         0F0  0F1  [0F2]  0F3      0F4  0F5  …\n"  #
        "  rank 0 | …  0B5  0B6  0B7  [0B8]  0STEP@1"
    )


def test_what_is_missing_is_drawn_where_it_should_stand() -> None:
    stream = (Forward(0, 0), Forward(0, 1), Backward(0, 1), Step(0, 1))
    program = Program((stream,), linear(1), 2)
    grid = grid_around(program, [2], Missing(0, 2, Backward(0, 0)))
    assert grid == "  rank 0 | 0F0  0F1  [0B0?]  [0B1]  0STEP@1"


def test_of_many_ranks_only_those_nearby_are_drawn() -> None:
    program = create("1f1b", num_ranks=16, num_microbatches=16).program()
    lines = grid_around(program, [row_of(program, 12, "12F5")]).splitlines()
    assert [line.split("|")[0].strip() for line in lines] == [f"rank {rank}" for rank in range(10, 15)]


def test_a_rank_without_instructions_is_left_out() -> None:
    program = Program(((), (Forward(1, 0),)), linear(2), 1)
    assert grid_around(program, [0]) == "  rank 1 | [1F0]"
