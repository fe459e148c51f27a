"""Recordings: what was written is what is read, and nothing else is read."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.schedules import Costs, Program, ScheduleError, Timeline, create
from stagewright.schedules.asynchronous import AsynchronousSchedule
from stagewright.schedules.explanation import explain
from stagewright.schedules.recording import FORMAT, MAX_BYTES, Recording
from stagewright.schedules.windows import Windows

NAMES = ("1f1b", "zbv", "dualpipe", "chimera", "interleaved", "gpipe")


def one_by_one(program: Program, seconds: float = 1.0) -> Timeline:
    """Every rank does one instruction after the other."""
    table = program.table
    starts = [(table.position[row]) * seconds for row in range(len(table))]
    return Timeline(program, Costs(), tuple(starts), tuple(start + seconds for start in starts))


def recording_of(name: str) -> Recording:
    program = create(name, num_ranks=4, num_microbatches=8).program()
    costs = Costs(forward=0.25, send=[0.5] * program.num_stages, bandwidth=1e9)
    return Recording.of(name, costs, [one_by_one(program), one_by_one(program, 0.125)])


@pytest.mark.parametrize("name", NAMES)
def test_what_was_written_is_read(name: str) -> None:
    recording = recording_of(name)
    read = Recording.from_json(recording.to_json())
    assert (read.schedule, read.costs, read.program) == (name, recording.costs, recording.program)
    assert [(step.starts, step.ends) for step in read.steps] == [(step.starts, step.ends) for step in recording.steps]


def test_a_window_of_an_endless_schedule_is_read() -> None:
    schedule = create("2bw", num_ranks=4, num_microbatches=8)
    assert isinstance(schedule, AsynchronousSchedule)
    piece = Windows(schedule).window(3, 0)
    program = Program(piece.streams, schedule.placement, 8, 12, schedule.update_rule)
    read = Recording.from_json(Recording.of("2bw", Costs(), [one_by_one(program)]).to_json())
    assert read.program == program
    assert all(split.inherent >= -1e-9 for split in explain(read.typical).splits)


def test_steps_of_other_programs_are_left_out() -> None:
    program = create("gpipe", num_ranks=2, num_microbatches=2).program()
    other = create("1f1b", num_ranks=2, num_microbatches=2).program()
    assert len(Recording.of("1f1b", Costs(), [one_by_one(program), one_by_one(other), one_by_one(other)]).steps) == 2


def test_the_typical_step_is_of_median_length() -> None:
    program = create("gpipe", num_ranks=2, num_microbatches=2).program()
    steps = [one_by_one(program, seconds) for seconds in (3.0, 1.0, 2.0)]
    assert Recording.of("gpipe", Costs(), steps).typical is steps[2]


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="too many for a recording"):
        Recording.from_json(" " * (MAX_BYTES + 1))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"format": NaN}', "1" * 5000, '"\\ud800"', "null"])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="."):
        Recording.from_json(text)


def changed(*path: str | int, to: Any) -> str:
    """A small recording with one value replaced."""
    program = create("1f1b", num_ranks=2, num_microbatches=2).program()
    document = json.loads(Recording.of("1f1b", Costs(), [one_by_one(program)]).to_json())
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (changed("format", to="other"), "format is 'stagewright trace 1'; got 'other'"),
        (changed("more", to=1), "the recording is an object with format, schedule"),
        (changed("schedule", to=3), "schedule is a text"),
        (changed("steps", to=[]), "steps is one step or more"),
        (changed("steps", 0, to=[[0, 1]]), "the times of 2 ranks"),
        (changed("steps", 0, 0, 0, to=True), "is a number"),
        (changed("steps", 0, 0, 0, to=1e300), "is a number"),
        (changed("steps", 0, 0, 1, to=-5.0), "none before the one before it"),
        (changed("costs", "forward", to=-1), "costs are finite"),
        (changed("costs", "forward", to=[1, 2, 3]), "one number a stage"),
        (changed("costs", "other", to=1), "costs is an object with some of"),
        (changed("program", "num_microbatches", to=10**9), "too large for a recording"),
        (changed("program", "num_microbatches", to=0), "a whole number from 1"),
        (changed("program", "num_batches", to=10**12), "a whole number from 1"),
        (changed("program", "routes", to=[[0, 7]]), "ranks below 2"),
        (changed("program", "routes", to=[[1, 0]]), "has no such stage"),
        (changed("program", "routes", to=[]), "same stages"),
        (changed("program", "assignment", to=[0]), "program.assignment"),
        (changed("program", "streams", 0, to="0F0,0FOO"), "'0FOO' is no instruction"),
        (changed("program", "streams", 0, to="0F0,0F0"), "nothing twice"),
        (changed("program", "streams", 0, to="5F0"), "nothing that does not exist"),
        (changed("program", "streams", 1, to="1F0,1SEND_F0"), "has no such stage"),
        (changed("program", "update_rule", to={"num_versions": [1, 1]}), "program.update_rule is an object"),
    ],
)  # fmt: skip
def test_what_is_no_recording_is_refused_with_the_place(text: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words.replace("[", r"\[")):
        Recording.from_json(text)


@settings(max_examples=150)
@given(st.data())
def test_nothing_but_value_errors_comes_of_damage(data: st.DataObject) -> None:
    """Whatever one or two values of a recording are replaced with: it is refused, or read and explained."""
    program = create(data.draw(st.sampled_from(["1f1b", "dualpipe"])), num_ranks=2, num_microbatches=4).program()
    document = json.loads(Recording.of("x", Costs(), [one_by_one(program)]).to_json())
    for _ in range(data.draw(st.integers(1, 2))):
        damage(document, data)
    try:
        explanation = explain(Recording.from_json(json.dumps(document)).typical)
    except ValueError:
        return
    assert all(split.bubble == pytest.approx(split.step - split.computing) for split in explanation.splits)


TOKENS = [
    "0F0",
    "1F1",
    "1B0",
    "0SEND_F1",
    "0RECV_B0",
    "1SEND_B0",
    "(0F1;0B0)OVERLAP_F_B",
    "SYNC_SCALARS",
    "0REDUCE_GRAD",
    "1STEP@3",
]
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 20), st.floats(), st.text(max_size=3), st.just([]), st.just({}),
    st.lists(st.sampled_from(TOKENS), max_size=12).map(",".join), st.lists(st.integers(0, 3), max_size=4),
)  # fmt: skip


def damage(document: Any, data: st.DataObject) -> None:
    """Replace a value somewhere."""
    place = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.integers(0, 3)) == 0:
            place[key] = data.draw(JUNK)
            return
        place = place[key]


@settings(max_examples=200)
@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda data: data.decode("latin-1")))
def test_nothing_but_value_errors_comes_of_any_text(text: str) -> None:
    with pytest.raises(ValueError, match="."):
        Recording.from_json(text)


def test_a_fused_pair_has_one_pair_of_times() -> None:
    recording = recording_of("dualpipe")
    document = json.loads(recording.to_json())
    assert document["format"] == FORMAT
    lengths = [len(times) for times in document["steps"][0]]
    assert lengths == [2 * len(stream) for stream in recording.program.streams]
    assert recording.program.table.fused


def test_an_endless_bandwidth_is_written_as_null() -> None:
    recording = replace(recording_of("1f1b"), costs=Costs())
    assert json.loads(recording.to_json())["costs"]["bandwidth"] is None
    assert Recording.from_json(recording.to_json()).costs == Costs()
