"""The token grammar: what is written is read back, and nothing else is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.schedules import Instruction, ScheduleError, parse
from stagewright.schedules import instructions as ins

number = st.integers(0, 999_999_999)
version = st.none() | number

INSTRUCTIONS = st.one_of(
    *(
        st.builds(kind, number, number, version)
        for kind in (ins.Forward, ins.Backward, ins.InputGradient, ins.WeightGradient)
    ),
    *(
        st.builds(kind, number, number)
        for kind in (ins.SendActivation, ins.ReceiveActivation, ins.SendGradient, ins.ReceiveGradient, ins.Step)
    ),
    *(st.builds(kind, number) for kind in (ins.Unshard, ins.Reshard, ins.ReduceGradient, ins.ReduceTied)),
    st.builds(ins.Overlap, st.builds(ins.Forward, number, number, version), st.builds(ins.Backward, number, number)),
    st.just(ins.SyncScalars()),
)

LITERAL = {
    "2F5": ins.Forward(2, 5),
    "2B5": ins.Backward(2, 5),
    "2I5": ins.InputGradient(2, 5),
    "2W5": ins.WeightGradient(2, 5),
    "2F5@1": ins.Forward(2, 5, 1),
    "10B12@0": ins.Backward(10, 12, 0),
    "2SEND_F5": ins.SendActivation(2, 5),
    "2RECV_F5": ins.ReceiveActivation(2, 5),
    "2SEND_B5": ins.SendGradient(2, 5),
    "2RECV_B5": ins.ReceiveGradient(2, 5),
    "(2F5;3B1)OVERLAP_F_B": ins.Overlap(ins.Forward(2, 5), ins.Backward(3, 1)),
    "(2F5@1;3B1@0)OVERLAP_F_B": ins.Overlap(ins.Forward(2, 5, 1), ins.Backward(3, 1, 0)),
    "2UNSHARD": ins.Unshard(2),
    "2RESHARD": ins.Reshard(2),
    "2REDUCE_GRAD": ins.ReduceGradient(2),
    "0REDUCE_TIED": ins.ReduceTied(0),
    "SYNC_SCALARS": ins.SyncScalars(),
    "2STEP@2": ins.Step(2, 2),
}


@pytest.mark.parametrize("token", LITERAL)
def test_every_kind_of_token(token: str) -> None:
    assert parse(token) == LITERAL[token]
    assert str(LITERAL[token]) == token


@given(INSTRUCTIONS)
def test_what_is_written_is_read_back(instruction: Instruction) -> None:
    assert parse(str(instruction)) == instruction


@pytest.mark.parametrize(
    "token",
    [
        *("2FOO", "0F0x", "2F5@", "2F", "F5", "2F5@@1", "2F5@1@1", "2F5 ", " 2F5", "2 F5", "2F5\n", "x2F5", "-1F0"),
        *("02F5", "2F05", "2F5@01", "00F0", "2STEP@01", "2F-1", "2F5@-1", "2F1_0", "2F1e3", "2F5.0", "+2F5"),
        *("2f5", "2Fi5", "2G5", "2SENDF5", "2SEND_F", "2SEND_F5@1", "2SEND_X5", "2RECV_5", "2SEND__F5", "_2F5"),
        *("2STEP", "2STEP5", "2STEP5@1", "2STEP@", "2UNSHARD5", "2UNSHARD@1", "2REDUCE_GRAD5", "UNSHARD"),
        *("REDUCE_TIED", "0SYNC_SCALARS", "SYNC_SCALARS0", "SYNC_SCALARS@1", "sync_scalars"),
        *("(2F5;3B1)", "(2F5;3B1)OVERLAP", "(3B1;2F5)OVERLAP_F_B", "(2F5;3F1)OVERLAP_F_B", "(2F5)OVERLAP_F_B"),
        *("(2F5;3B1;4B1)OVERLAP_F_B", "(2F5;3B1)OVERLAP_F_B0", "((2F5;3B1);3B1)OVERLAP_F_B", "(2F5;3I1)OVERLAP_F_B"),
        *("1000000000F0", "0F1000000000", "٢F5", "2F٥", "２F5", "", " ", ",", "None", "2F5,2F6"),
    ],
)
def test_what_is_not_one_whole_token_is_refused(token: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse(token)
    assert caught.value.rule == "token"
    assert repr(token) in str(caught.value)


@given(st.text(alphabet="0123456789FBIWSENDRCV_@();STEPOLA \n", max_size=24))
def test_whatever_is_read_is_written_the_same(token: str) -> None:
    """Two texts never mean the same instruction."""
    try:
        instruction = parse(token)
    except ScheduleError:
        return
    assert str(instruction) == token


def test_instructions_are_frozen_and_equal_by_value() -> None:
    assert {parse("2F5"), ins.Forward(2, 5), ins.Forward(2, 5, None)} == {ins.Forward(2, 5)}
    assert ins.Forward(2, 5) != ins.Backward(2, 5)
    with pytest.raises(AttributeError):
        ins.Forward(2, 5).stage = 3  # type: ignore[misc]


def test_every_instruction_says_in_one_line_what_it_does() -> None:
    kinds = {type(instruction) for instruction in LITERAL.values()}
    assert len(kinds) == 15
    for kind in kinds:
        assert kind.__doc__ is not None
        assert kind.__doc__.count("\n") == 0, kind
