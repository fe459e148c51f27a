"""Programs as text, and what a text must be to be one."""

from dataclasses import replace

import pytest

from stagewright.schedules import Placement, Program, ScheduleError, UpdateRule, create, names, verify
from stagewright.schedules.instructions import Backward, Forward, Step
from stagewright.schedules.placement import linear, looped, waves

SHAPES = [(1, 1), (1, 3), (2, 2), (2, 4), (3, 5), (4, 8), (6, 12)]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", names())
def test_every_schedule_survives_the_way_through_text(name: str, steps: int) -> None:
    served = 0
    for num_ranks, num_microbatches in SHAPES:
        try:
            schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        except ScheduleError:
            continue  # a shape that it does not serve
        served += 1
        program = schedule.program(steps)
        text = program.to_csv()
        read = Program.from_csv(text, placement=program.placement, num_microbatches=program.num_microbatches)
        assert replace(read, update_rule=program.update_rule) == program
        assert read.to_csv() == text
        guessed = Program.from_csv(text, num_microbatches=program.num_microbatches)
        assert guessed.streams == program.streams
        for stage in range(program.num_stages):
            for microbatch in range(program.num_microbatches * steps):
                owner = program.placement.rank_of(stage, microbatch)
                assert guessed.placement.rank_of(stage, microbatch) == owner
        verify(replace(guessed, update_rule=program.update_rule))
    assert served


def test_cells_may_be_empty_and_lines_may_end_as_they_like() -> None:
    read = Program.from_csv("0F0,,0F1,0B0, 0B1\r\n,1F0,1B0,1F1,1B1,,\r\n\r\n")
    assert read.to_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert (read.num_ranks, read.num_microbatches, read.num_batches) == (2, 2, 1)


@pytest.mark.parametrize(
    ("text", "routes"),
    [
        ("0F0,0B0\n1F0,1B0", ((0, 1),)),
        ("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0", ((0, 1, 0, 1),)),
        ("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0", ((0, 1, 1, 0),)),
        ("0F0,1F1,1B1,0B0\n1F0,0F1,0B1,1B0", ((0, 1), (1, 0))),
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1", ((0,),)),
        ("1F0,1I0,1W0\n0F0,0I0,0W0", ((1, 0),)),
    ],
)
def test_the_placement_is_read_off_the_computations(text: str, routes: tuple[tuple[int, ...], ...]) -> None:
    assert Program.from_csv(text).placement.routes == routes


def test_batches_are_counted_by_their_microbatches() -> None:
    text = ",".join(f"0F{m},0B{m}" for m in range(6))
    assert Program.from_csv(text).num_batches == 1
    read = Program.from_csv(text, num_microbatches=2)
    assert (read.num_microbatches, read.num_batches, read.table.num_microbatches) == (2, 3, 6)
    assert read.updates == UpdateRule(2, (1,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,2FOO,1B0", "token: rank 1, column 1: '2FOO' is no instruction; one is written like 2F5"),
        ("0F0,,,0F0x", "token: rank 0, column 3: '0F0x' is no instruction"),
        ("0F0\n\n02F0", "token: rank 2, column 0: '02F0' is no instruction"),
        ("0F0,0B0;0F1", "token: rank 0, column 1: '0B0;0F1' is no instruction"),
    ],
)
def test_a_bad_cell_is_named_with_its_rank_its_column_and_its_text(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Program.from_csv(text)
    assert str(caught.value).startswith(message)
    assert caught.value.rule == "token"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a program has at least one rank"),
        (" \n\t\n", "a program has at least one rank"),
        (",,\n", "a program computes something"),
        ("0STEP@1", "a program computes something"),
        ("0F0,0B0,1F1,1B1", "microbatch 0 never runs on stage 1"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1B0,1B0", "microbatch 1 never runs on stage 1"),
        ("0F999999999", "1 stages and 1000000000 microbatches by their highest numbers, but 1 computations"),
        ("999999999F0", "1000000000 stages and 1 microbatches by their highest numbers, but 1 computations"),
        ("999999999F999999999", "by their highest numbers, but 1 computations"),
        ("1F0,1B0\n2F0,2B0\n0F0,0B0\n,", "one stream a rank: got 4 streams for a placement on 3 ranks"),
    ],
)
def test_what_is_no_program(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Program.from_csv(text)


def test_what_does_not_fit_the_shape_that_was_asked_for() -> None:
    text = "0F0,0B0\n1F0,1B0"
    assert Program.from_csv(text, num_chunks=1, placement=linear(2)) == Program.from_csv(text)
    with pytest.raises(ScheduleError, match="a rank owns 1 stages here, not num_chunks=2"):
        Program.from_csv(text, num_chunks=2)
    with pytest.raises(ScheduleError, match="1 microbatches are no whole number of batches of 2"):
        Program.from_csv(text, num_microbatches=2)
    with pytest.raises(ScheduleError, match="got 2 streams for a placement on 3 ranks"):
        Program.from_csv(text, placement=waves(3))
    with pytest.raises(ScheduleError, match="placement: rank 0: 0F0"):
        verify(Program.from_csv(text, placement=Placement(((1, 0),))))
    with pytest.raises(ScheduleError, match="missing compute: microbatch 0 has no F on stage 2"):
        verify(Program.from_csv(text, placement=looped(2, 2)))


def test_an_update_rule_that_makes_no_sense() -> None:
    for counts in ((0, (1,), 0, 1), (1, (0,), 0, 1), (1, (1,), -1, 1), (1, (1,), 0, 0)):
        with pytest.raises(ScheduleError) as caught:
            UpdateRule(*counts)
        assert caught.value.rule == "update rule"
    streams = ((Forward(0, 0), Backward(0, 0), Step(0, 1)),)
    with pytest.raises(ScheduleError, match="weight versions each of the 1 ranks keeps"):
        Program(streams, linear(1), 1, 1, UpdateRule(1, (1, 1)))


def test_a_placement_has_a_name() -> None:
    text = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0"
    assert Program.from_csv(text, placement="v") == Program.from_csv(text, placement=waves(2))
    with pytest.raises(ScheduleError, match="linear on 2 ranks has 2 stages, but here are 4"):
        Program.from_csv(text, placement="linear")
    with pytest.raises(ScheduleError, match="there is no placement 'round': there are linear, loop, v, wave, bidir"):
        Program.from_csv(text, placement="round")
