"""The columns of a program."""

from programs import TWO_RANKS, program_of

from stagewright.schedules import Program, create
from stagewright.schedules.instructions import Backward, Forward, Overlap, ReduceGradient, Step, SyncScalars
from stagewright.schedules.placement import linear, waves
from stagewright.schedules.table import BACKWARD, FORWARD, OPERATIONS, REDUCE_GRADIENT, STEP, Table


def test_every_row_gives_back_its_instruction() -> None:
    program = create("zb-h1", num_ranks=3, num_microbatches=4).program()
    table = program.table
    kinds = {operation: kind for kind, operation in OPERATIONS.items()}
    for rank, stream in enumerate(program.streams):
        rows = range(table.first_row[rank], table.first_row[rank + 1])
        assert len(rows) == len(stream)
        for row, instruction in zip(rows, stream):
            assert table.rank[row] == rank
            assert stream[table.position[row]] is instruction
            assert kinds[table.operation[row]] is type(instruction)
            assert table.stage[row] == instruction.stage
            assert table.microbatch[row] == getattr(instruction, "microbatch", -1)


def test_the_rows_that_do_a_thing_are_found_by_stage_and_microbatch() -> None:
    program = program_of(TWO_RANKS)
    table = program.table
    assert [str(program.streams[0][row]) for row in table.forward[:2]] == ["0F0", "0F1"]
    assert table.forward == [0, 2, 10, 14]
    assert table.input_gradient == table.weight_gradient == [5, 7, 12, 15]
    assert table.send_activation == [1, 3, -1, -1]
    assert table.receive_activation == [-1, -1, 9, 11]
    assert table.send_gradient == [-1, -1, 13, 16]
    assert table.receive_gradient == [4, 6, -1, -1]
    assert table.others == [8, 17]
    assert table.rows_of(STEP) == {(0, 0): [8], (1, 1): [17]}
    assert not table.repeated
    assert not table.outside


def test_a_fused_pair_is_two_rows_at_one_position() -> None:
    pair = Overlap(Forward(1, 1, 3), Backward(0, 0))
    table = Table(((Forward(0, 0), Forward(1, 0), pair, Step(0, 1)),), waves(1), 2)
    assert table.operation == [FORWARD, FORWARD, FORWARD, BACKWARD, STEP]
    assert table.position == [0, 1, 2, 2, 3]
    assert table.fused == {2}
    assert table.version == [-1, -1, 3, -1, 1]
    assert table.forward == [0, -1, 1, 2]
    assert table.input_gradient == [3, -1, -1, -1]


def test_what_is_repeated_or_outside() -> None:
    stream = (
        Forward(0, 0),
        Forward(0, 0),
        Backward(0, 0),
        Backward(0, 0),
        Forward(1, 0),
        Forward(0, 9),
        Forward(-1, 0),
    )
    table = Table(((*stream, Step(7, 1), SyncScalars(), ReduceGradient(0)),), linear(1), 1)
    assert table.repeated == [1, 3, 3]  # a full backward is both gradients again
    assert table.outside == [4, 5, 6, 7]
    assert table.others == [8, 9]
    assert table.rows_of(REDUCE_GRADIENT) == {(0, 0): [9]}
    assert table.forward == [0]


def test_a_program_keeps_its_table() -> None:
    program = program_of(TWO_RANKS)
    assert program.table is program.table
    assert len(program.table) == 18
    assert Program(program.streams, program.placement, 2).table is not program.table
