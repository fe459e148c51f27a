"""Measured timelines: every rank's instructions one after the other, no result used before it is there."""

from itertools import pairwise

import pytest
from launching import launch_on
from measuring import BACKWARD_SECONDS, FORWARD_SECONDS, measure

from stagewright.engine.timing.trace import History, Record, timeline_of
from stagewright.engine.transport.hub import Hub
from stagewright.engine.transport.threads import ThreadTransport
from stagewright.schedules import Program, Timeline
from stagewright.schedules.instructions import Backward, Forward
from stagewright.schedules.placement import linear

NUM_MICROBATCHES = 4


@pytest.fixture(scope="module", params=["1f1b", "gpipe"])
def timelines(request: pytest.FixtureRequest) -> list[Timeline]:
    return launch_on("gloo", measure, 2, (request.param, NUM_MICROBATCHES))


@pytest.fixture
def timeline(timelines: list[Timeline]) -> Timeline:
    return timelines[0]


def test_every_rank_gets_the_same_timeline(timelines: list[Timeline]) -> None:
    assert timelines[0].starts == timelines[1].starts
    assert timelines[0].ends == timelines[1].ends


def test_it_begins_at_zero(timeline: Timeline) -> None:
    assert min(timeline.starts) == 0


def test_the_instructions_of_a_rank_follow_one_another(timeline: Timeline) -> None:
    for rank, events in enumerate(timeline.events):
        assert [event.instruction for event in events] == list(timeline.program.streams[rank])
        assert all(event.start <= event.end for event in events)
        assert all(one.end <= other.start for one, other in pairwise(events))


def test_computations_take_what_they_take(timeline: Timeline) -> None:
    for events in timeline.events:
        for event in events:
            match event.instruction:
                case Forward():
                    assert event.end - event.start >= FORWARD_SECONDS
                case Backward():
                    assert event.end - event.start >= BACKWARD_SECONDS


def test_nothing_is_computed_before_its_input_is_there(timeline: Timeline) -> None:
    times = {str(event.instruction): event for events in timeline.events for event in events}
    for microbatch in range(NUM_MICROBATCHES):
        assert times[f"0F{microbatch}"].end <= times[f"1F{microbatch}"].start
        assert times[f"1B{microbatch}"].end <= times[f"0B{microbatch}"].start


def test_a_step_takes_no_less_than_the_schedule_says(timeline: Timeline) -> None:
    slots = NUM_MICROBATCHES + timeline.program.num_ranks - 1
    assert timeline.makespan >= slots * (FORWARD_SECONDS + BACKWARD_SECONDS)
    assert 0 < timeline.bubble_fraction < 1


# Put together

TWO_RANKS = Program.from_csv(
    "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0STEP@1\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1STEP@1",
    placement=linear(2),
)


def record(machine: str, clock: float, start: float) -> Record:
    """Six instructions of one second, one after the other."""
    return Record(machine, clock, tuple(start + second for step in range(6) for second in (step, step + 1)))


def test_ranks_of_one_machine_share_a_clock() -> None:
    """Whatever their clocks showed: they are the same clock, read a little later."""
    timeline = timeline_of(TWO_RANKS, [record("here", 50.0, 10.0), record("here", 50.3, 12.0)])
    assert timeline.starts == (*range(6), *range(2, 8))
    assert timeline.ends == (*range(1, 7), *range(3, 9))


def test_clocks_of_other_machines_are_put_right() -> None:
    timeline = timeline_of(TWO_RANKS, [record("here", 50.0, 10.0), record("there", 90_050.0, 90_012.0)])
    assert timeline.starts == (*range(6), *range(2, 8))


def test_both_halves_of_a_fused_pair_have_its_times() -> None:
    text = "0F0,0F1,0B0,(0F2;0B1)OVERLAP_F_B,0B2,0REDUCE_GRAD,0STEP@1"
    program = Program.from_csv(text, placement=linear(1))
    times = tuple(float(second) for step in range(7) for second in (step, step + 1))
    timeline = timeline_of(program, [Record("here", 0.0, times)])
    assert timeline.starts == (0, 1, 2, 3, 3, 4, 5, 6)


@pytest.mark.parametrize("machine", ["", "node-1", "Rechner-ü"])
@pytest.mark.parametrize("times", [(), (1.5, 2.5)])
def test_records_travel(machine: str, times: tuple[float, ...]) -> None:
    record = Record(machine, 7.25, times)
    assert Record.from_bytes(record.to_bytes()) == record


@pytest.mark.parametrize(("num_steps", "remedy"), [(0, "got num_steps=0"), (-1, "got num_steps=-1"), (1, "train_step")])
def test_what_there_is_nothing_of_is_refused(num_steps: int, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        History(ThreadTransport(Hub(1), 0)).timelines(num_steps)
