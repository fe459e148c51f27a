"""The communication pass: what is sent and received, and where in the streams."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stagewright.schedules import Program, Schedule, ScheduleError, create, insert_communication, names
from stagewright.schedules.communication import communicates
from stagewright.schedules.instructions import (
    Backward,
    Forward,
    InputGradient,
    Instruction,
    Overlap,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from stagewright.schedules.placement import Placement, linear, waves

COMMUNICATION = (SendActivation, ReceiveActivation, SendGradient, ReceiveGradient)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule at a small shape."""
    name = draw(st.sampled_from(names()))
    try:
        return create(name, num_ranks=draw(st.integers(1, 6)), num_microbatches=draw(st.integers(1, 12)))
    except ScheduleError:
        assume(False)
        raise


def computed(schedule: Schedule) -> Program:
    """A schedule's program before anything is sent."""
    return Program(schedule.streams(1), schedule.placement, schedule.num_units, 1, schedule.update_rule)


def made_by(instruction: Instruction, program: Program) -> list[Instruction]:
    """The sends that must follow an instruction at once: one for each output that another rank needs."""
    parts = (instruction.forward, instruction.backward) if isinstance(instruction, Overlap) else (instruction,)
    rank_of = program.placement.rank_of
    sends: list[Instruction] = []
    for part in parts:
        last = program.num_stages - 1
        if isinstance(part, Forward) and part.stage < last:
            neighbour, send = part.stage + 1, SendActivation(part.stage, part.microbatch)
        elif isinstance(part, Backward | InputGradient) and part.stage > 0:
            neighbour, send = part.stage - 1, SendGradient(part.stage, part.microbatch)
        else:
            continue
        if rank_of(part.stage, part.microbatch) != rank_of(neighbour, part.microbatch):
            sends.append(send)
    return sends


def test_1f1b_on_two_ranks() -> None:
    """1B0 starts at tick 2, when rank 0 has begun 0F1 and nothing since: its receive is posted before that."""
    program = insert_communication(Program.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"))
    assert program.to_csv().splitlines() == [
        "0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,0B1",
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1",
    ]


def test_a_fused_pair_is_not_torn_apart() -> None:
    """Both receives stand before it, both sends after it, the forward's first."""
    text = "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n2F0,2B0,2F1,2B1"
    streams = insert_communication(Program.from_csv(text)).to_csv().splitlines()
    assert "(1F1;1B0)OVERLAP_F_B,1SEND_F1,1SEND_B0" in streams[1]
    assert streams[1].index("1RECV_F1") < streams[1].index("(")
    assert streams[1].index("1RECV_B0") < streams[1].index("(")


def test_stages_on_one_rank_send_nothing_to_each_other() -> None:
    program = insert_communication(Program.from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0", placement=waves(2)))
    sends = [str(instruction) for stream in program.streams for instruction in stream if "SEND" in str(instruction)]
    assert sends == ["0SEND_F0", "3SEND_B0", "2SEND_F0", "1SEND_B0"]


@given(schedules())
def test_a_send_stands_right_after_its_producer_and_nothing_else_changes(schedule: Schedule) -> None:
    before = computed(schedule)
    after = insert_communication(before)
    for computing, stream in zip(before.streams, after.streams):
        assert tuple(instruction for instruction in stream if not isinstance(instruction, COMMUNICATION)) == computing
        without_receives = [
            instruction for instruction in stream if not isinstance(instruction, ReceiveActivation | ReceiveGradient)
        ]
        expected = [part for instruction in computing for part in (instruction, *made_by(instruction, before))]
        assert without_receives == expected


@given(schedules())
def test_each_channel_is_received_in_the_order_in_which_it_is_sent(schedule: Schedule) -> None:
    program = insert_communication(computed(schedule))
    rank_of = program.placement.rank_of
    sent: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}
    received: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}
    for rank, stream in enumerate(program.streams):
        for instruction in stream:
            match instruction:
                case SendActivation(stage, microbatch):
                    channel = (rank, rank_of(stage + 1, microbatch), True)
                    sent.setdefault(channel, []).append((stage + 1, microbatch))
                case SendGradient(stage, microbatch):
                    channel = (rank, rank_of(stage - 1, microbatch), False)
                    sent.setdefault(channel, []).append((stage - 1, microbatch))
                case ReceiveActivation(stage, microbatch):
                    channel = (rank_of(stage - 1, microbatch), rank, True)
                    received.setdefault(channel, []).append((stage, microbatch))
                case ReceiveGradient(stage, microbatch):
                    channel = (rank_of(stage + 1, microbatch), rank, False)
                    received.setdefault(channel, []).append((stage, microbatch))
    assert sent == received


@given(schedules())
def test_a_receive_is_posted_before_the_instruction_that_needs_it(schedule: Schedule) -> None:
    for stream in insert_communication(computed(schedule)).streams:
        posted: set[tuple[bool, int, int]] = set()
        for instruction in stream:
            if isinstance(instruction, ReceiveActivation | ReceiveGradient):
                is_activation = isinstance(instruction, ReceiveActivation)
                posted.add((is_activation, instruction.stage, instruction.microbatch))
        for instruction in stream:
            if isinstance(instruction, ReceiveActivation | ReceiveGradient):
                is_activation = isinstance(instruction, ReceiveActivation)
                posted.remove((is_activation, instruction.stage, instruction.microbatch))
            parts = (instruction.forward, instruction.backward) if isinstance(instruction, Overlap) else (instruction,)
            for part in parts:
                if isinstance(part, Forward):
                    assert (True, part.stage, part.microbatch) not in posted
                elif isinstance(part, Backward | InputGradient):
                    assert (False, part.stage, part.microbatch) not in posted


def test_orders_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"circular wait: .*rank 0 at instruction 0, rank 1 at instruction 0"):
        insert_communication(Program.from_csv("0B0,0F0\n1F0,1B0"))


def test_what_does_not_exist_is_left_for_the_proof_to_name() -> None:
    program = Program(((Forward(0, 0), Backward(0, 0), Forward(5, 0)), (Forward(1, 0), Backward(1, 0))), linear(2), 1)
    assert str(insert_communication(program).streams[0][-1]) == "5F0"


def test_a_program_on_one_rank_has_nothing_to_say() -> None:
    assert communicates(Program.from_csv("0F0,0B0"))
    assert communicates(Program.from_csv("0F0,1F0,1B0,0B0", placement=Placement(((0, 0),))))
    assert not communicates(Program.from_csv("0F0,0B0\n1F0,1B0"))
    assert communicates(insert_communication(Program.from_csv("0F0,0B0\n1F0,1B0")))
