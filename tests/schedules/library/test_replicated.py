"""Stages with several replicas: who computes what, in which order, with which weights, and what it costs."""

import re
from collections.abc import Iterator
from inspect import cleandoc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.schedules import Costs, Placement, Program, Schedule, ScheduleError, Timeline, create, simulate, verify
from stagewright.schedules.arguments import read_options
from stagewright.schedules.asynchronous import AsynchronousSchedule
from stagewright.schedules.drawing import grid_text
from stagewright.schedules.drawing.cells import picture_of
from stagewright.schedules.instructions import Backward, ReduceGradient, ReduceTied, SendGradient, Step, SyncScalars
from stagewright.schedules.library import OneFOneB
from stagewright.schedules.proof import SEMANTICS
from stagewright.schedules.replicated import Replication
from stagewright.schedules.variants import forward_only
from stagewright.schedules.windows import Windows

Counts = tuple[int, ...]
COUNTS = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
ASYNCHRONOUS = [("2bw", {}), ("pipedream", {}), ("pipedream", {"vertical_sync": True})]


def replicated(name: str, counts: Counts, num_microbatches: int, **options: object) -> Schedule:
    return create(name, num_ranks=sum(counts), num_microbatches=num_microbatches, replicas=counts, **options)


def asynchronous(name: str, counts: Counts, num_microbatches: int, **options: object) -> AsynchronousSchedule:
    schedule = replicated(name, counts, num_microbatches, **options)
    assert isinstance(schedule, AsynchronousSchedule)
    return schedule


def balanced(counts: Counts, forward: float = 1, backward: float = 2) -> Costs:
    """What stages take that are cut so that each of their ranks has as much to do."""
    return Costs(forward=[count * forward for count in counts], backward=[count * backward for count in counts])


def least(name: str, counts: Counts) -> int:
    """The fewest microbatches of a batch that a schedule serves."""
    for num_microbatches in range(1, 400):
        try:
            replicated(name, counts, num_microbatches)
        except ScheduleError:
            continue
        return num_microbatches
    raise AssertionError("none was found")


# Who computes what


def test_streams() -> None:
    """Microbatches go round; gradients are summed right behind a rank's last one, and the SEND of it."""
    assert replicated("1f1b", (1, 2), 3).program().to_csv().splitlines() == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0RECV_B1,0F2,0SEND_F2,0RECV_B2,0B0,0B1,0B2,0STEP@1",
        "1RECV_F0,1RECV_F2,1F0,1B0,1SEND_B0,1F2,1B2,1SEND_B2,1REDUCE_GRAD,1STEP@1",
        "1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1STEP@1",
    ]


def test_the_docstring_shows_the_schedule() -> None:
    lines = [line.strip() for line in cleandoc(OneFOneB.__doc__ or "").splitlines()]
    shown = [line.split("  ", 1)[1] for line in lines if re.match(r"stage \d  ", line)]
    counts = (2, 1)
    drawn = grid_text(simulate(replicated("1f1b", counts, 4).program(), balanced(counts))).splitlines()
    assert shown == [line.split("  ", 1)[1] for line in drawn]


@pytest.mark.parametrize(
    ("counts", "num_warmup"),
    [
        ((1, 1, 1, 1), [3, 2, 1, 0]),
        ((2, 1), [1, 0]),
        ((1, 2), [2, 0]),
        ((3, 2), [1, 0]),
        ((2, 2), [1, 0]),
        ((1, 2, 1), [4, 1, 0]),
        ((4, 2, 1), [1, 1, 0]),
        ((1, 2, 4), [6, 2, 0]),
        ((3,), [0]),
    ],
)
def test_forwards_in_advance_and_peak_stash(counts: Counts, num_warmup: list[int]) -> None:
    """One more than the forwards in advance; PipeDream's own number where nothing is rounded twice."""
    replication = Replication(counts)
    assert [replication.num_warmup(stage) for stage in range(len(counts))] == num_warmup
    if counts != (1, 2, 1):
        assert num_warmup[0] + 1 == -(-sum(counts) // counts[0])
    of_ranks = [num_warmup[stage] for stage, count in enumerate(counts) for _ in range(count)]
    timeline = simulate(replicated("1f1b", counts, 24).program())
    assert timeline.peak_stash == tuple(warmup + 1 for warmup in of_ranks)


def test_a_replica_without_microbatches_takes_part_in_the_sum() -> None:
    program = replicated("1f1b", (3, 2), 1).program()
    assert program.streams[1] == program.streams[2] == (ReduceGradient(0), Step(0, 1))
    assert program.streams[4] == (ReduceGradient(1), Step(1, 1))


@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, num_microbatches=st.integers(1, 12), deep_warmup=st.booleans())
def test_1f1b_is_legal_at_every_shape(counts: Counts, num_microbatches: int, deep_warmup: bool) -> None:
    program = replicated("1f1b", counts, num_microbatches, deep_warmup=deep_warmup).program(2)
    for semantics in SEMANTICS:
        verify(program, semantics)
    for rank, stream in enumerate(program.streams):
        (stage,) = program.placement.stages_of(rank)
        assert stream.count(ReduceGradient(stage)) == (2 if counts[stage] > 1 else 0)
        for before, instruction in pairwise(stream):
            if isinstance(instruction, ReduceGradient) and not isinstance(before, Step):
                assert isinstance(before, Backward | SendGradient)


def test_one_replica_each_is_the_schedule_without_the_option() -> None:
    for name in ("1f1b", "2bw", "pipedream"):
        plain = create(name, num_ranks=3, num_microbatches=4)
        assert replicated(name, (1, 1, 1), 4).program() == plain.program()


def test_files() -> None:
    """The placement is read off the computations, and off the sums for a replica that computes nothing."""
    for counts, num_microbatches in [((2, 1), 5), ((1, 2, 1), 6), ((3, 2), 2), ((2, 2), 1)]:
        program = replicated("1f1b", counts, num_microbatches).program()
        read = Program.from_csv(program.to_csv())
        assert read.streams == program.streams
        for stage in range(len(counts)):
            assert read.placement.replicas_of(stage) == program.placement.replicas_of(stage)
        verify(read)


def test_pictures_have_no_second_direction() -> None:
    timeline = simulate(replicated("1f1b", (2, 1), 4).program())
    assert not picture_of(timeline).is_bidirectional
    assert picture_of(timeline).num_shades == 1


def test_evaluation_runs_on_first_replicas() -> None:
    placement = replicated("1f1b", (1, 2), 4).placement
    program = forward_only(placement, 3)
    assert [len(stream) for stream in program.streams] == [6, 6, 0]
    assert program.placement == Placement(placement.routes, (0, 0, 0))


def test_the_option_as_text() -> None:
    assert read_options(["replicas=2,1", "other=3,", "text=a,b"]) == {"replicas": (2, 1), "other": (3,), "text": "a,b"}
    assert replicated("1f1b", (2, 1), 3) == create("1f1b", num_ranks=3, num_microbatches=3, replicas=[2, 1])


# What it costs


def idle(timeline: Timeline) -> float:
    """The time that the busiest rank stands still."""
    return timeline.makespan - timeline.ideal


@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, num_microbatches=st.integers(1, 24), forward=st.integers(1, 3), backward=st.integers(1, 3))
def test_the_last_stage_never_waits(counts: Counts, num_microbatches: int, forward: int, backward: int) -> None:
    """Where it has one rank, the time to reach it and to come back from it is all there is."""
    counts = (*counts, 1)
    timeline = simulate(replicated("1f1b", counts, num_microbatches).program(), balanced(counts, forward, backward))
    assert timeline.makespan == (num_microbatches + sum(counts) - 1) * (forward + backward)


@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, num_microbatches=st.integers(1, 12), num_stages=st.integers(1, 4))
def test_equal_replicas_are_pipelines_side_by_side(counts: Counts, num_microbatches: int, num_stages: int) -> None:
    same = counts[:1] * num_stages
    schedule, costs = replicated("1f1b", same, num_microbatches), Costs(forward=1.5, backward=2)
    formula = schedule.bubble_formula(costs)
    assert formula is not None
    assert formula.agrees_with(simulate(schedule.program(), costs))
    if len(set(counts)) > 1:
        assert replicated("1f1b", counts, num_microbatches).bubble_formula(costs) is None


@pytest.mark.parametrize(("name", "options"), ASYNCHRONOUS)
@pytest.mark.parametrize("counts", [(2, 1), (1, 2), (3, 2), (2, 2), (1, 2, 1), (2, 1, 1), (4, 2, 1), (2, 3, 2), (3,)])
def test_no_bubble_in_the_steady_state(name: str, options: dict[str, object], counts: Counts) -> None:
    """Neither where stages are balanced, nor where the one with the fewest replicas holds all others up."""
    num_microbatches = 2 * Replication(counts).round if name == "pipedream" else 12
    schedule = asynchronous(name, counts, num_microbatches, **options)
    for costs in (balanced(counts), Costs(forward=1, backward=2)):
        formula = schedule.bubble_formula(costs)
        assert formula is not None
        timeline = simulate(schedule.program(12), costs)
        assert formula.agrees_with(timeline)
        assert timeline.steady_period == num_microbatches * (3 if costs.forward != 1 else 3 / min(counts))


def test_where_replicas_wait_for_each_other_no_bubble_is_promised() -> None:
    schedule = asynchronous("2bw", (2, 1, 1), 2)
    assert schedule.bubble_formula(balanced((2, 1, 1))) is None
    assert simulate(schedule.program(8), balanced((2, 1, 1))).steady_period > 2 * 3
    assert asynchronous("2bw", (2, 1), 5).bubble_formula(balanced((2, 1))) is None


# With which weights


def test_windows_of_2bw() -> None:
    """A STEP waits until its version is read: the other replica is up to a microbatch later."""
    schedule = asynchronous("2bw", (2, 1), 4)
    program = Windows(schedule).program((3,))
    assert program.updates.num_gradient_buffers == 2
    work = [str(item) for item in program.streams[0] if not re.match(r"\d(SEND|RECV)", str(item))]
    assert " ".join(work) == (
        "0F0@0 0F2@0 0B0@0 0F4@0 0B2@0 0REDUCE_GRAD 0F6@0 0B4@0 0STEP@1 0F8@1 0B6@0 0REDUCE_GRAD "
        "0F10@1 0B8@1 0B10@1 0STEP@2 0REDUCE_GRAD 0STEP@3"
    )
    last = [str(item) for item in program.streams[2] if isinstance(item, Step | ReduceGradient)]
    assert last == ["1STEP@1", "1STEP@2", "1STEP@3"]


@pytest.mark.parametrize(
    ("counts", "delays", "synced"),
    [
        ((1, 1, 1), [2, 1, 0], 2),
        ((2, 1), [2, 0], 2),
        ((1, 2), [1, 1], 1),
        ((3, 2), [1, 1], 1),
        ((2, 2), [1, 0], 1),
        ((1, 2, 1), [2, 2, 0], 2),
        ((3,), [0], 0),
    ],
)
def test_delays_of_pipedream(counts: Counts, delays: list[int], synced: int) -> None:
    """Round j computes with version max(j - d, 0) on every replica of a stage, and makes version j + 1."""
    num_microbatches = 2 * Replication(counts).round
    per_update = Replication(counts).round
    for vertical_sync, of_stages in ((False, delays), (True, [synced] * len(counts))):
        program = asynchronous("pipedream", counts, num_microbatches, vertical_sync=vertical_sync).program(4)
        of_ranks = [delay for delay, count in zip(of_stages, counts) for _ in range(count)]
        assert program.updates.num_versions == tuple(delay + 1 for delay in of_ranks)
        assert program.updates.max_staleness == max(of_stages)
        assert program.updates.microbatches_per_update == per_update
        for stream in program.streams:
            for item in stream:
                if isinstance(item, Backward):
                    assert item.version == max(item.microbatch // per_update - of_stages[item.stage], 0)


@pytest.mark.parametrize(("name", "options"), ASYNCHRONOUS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_windows_with_drains_anywhere_are_legal(name: str, options: dict[str, object], data: st.DataObject) -> None:
    """At every shape from the least on, and where updates wait for what other ranks know."""
    counts = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple), "counts")
    step = Replication(counts).round if name == "pipedream" else 1
    num_microbatches = least(name, counts) + step * data.draw(st.integers(0, 3), "more")
    schedule = asynchronous(name, counts, num_microbatches, **options)
    tied = frozenset({0, len(counts) - 1}) if name == "2bw" and data.draw(st.booleans(), "tied") else frozenset[int]()
    windows = Windows(schedule, tied, scalars=name == "2bw" and data.draw(st.booleans(), "scalars"))
    gaps = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3), "gaps")
    program = windows.program([sum(gaps[: count + 1]) for count in range(len(gaps))])
    for semantics in SEMANTICS:
        verify(program, semantics)
    far, later = windows.window(1000, 0), windows.window(1001, 0)
    assert far.name == later.name
    assert later.versions == far.versions + num_microbatches // schedule.microbatches_per_update


def updates(program: Program, rank: int) -> Iterator[str]:
    for item in program.streams[rank]:
        if isinstance(item, ReduceGradient | ReduceTied | SyncScalars | Step):
            yield str(item)


def test_sums_over_replicas_come_before_those_over_stages() -> None:
    program = Windows(asynchronous("2bw", (2, 1), 4), frozenset({0, 1}), scalars=True).program((2,))
    of_batch = "0REDUCE_GRAD 0REDUCE_TIED SYNC_SCALARS"
    assert " ".join(updates(program, 0)) == f"{of_batch} 0STEP@1 {of_batch} 0STEP@2"


# What is refused


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches", "replicas", "message"),
    [
        (
            "1f1b",
            3,
            4,
            (2, 2),
            "every rank is a replica of one stage: replicas 2-2 are 4 ranks, got 3; use 4 ranks, or replicas that add "
            "up to 3",
        ),
        ("1f1b", 3, 4, 3, "replicas is a number for each stage, such as (2, 1): got 3"),
        ("1f1b", 3, 4, (3, 0), "a stage has one replica or more: got replicas=(3, 0)"),
        ("1f1b", 3, 4, (2, 1.0), "a stage has one replica or more: got replicas=(2, 1.0)"),
        (
            "2bw",
            3,
            1,
            (2, 1),
            "2bw needs a microbatch for each forward that the replicas of a stage do in advance, and one for each "
            "replica, so that a batch's version exists when its first forward reads it: got 1 for replicas 2-1; use 2 "
            "or more",
        ),
        (
            "pipedream",
            3,
            5,
            (2, 1),
            "pipedream makes an update whenever all replicas of every stage have had their turn: with replicas 2-1 "
            "after 2 microbatches, got 5 a batch; use 4 or 6",
        ),
        ("gpipe", 3, 4, (2, 1), "gpipe has no option 'replicas': it takes last_first"),
    ],
)
def test_refusals(name: str, num_ranks: int, num_microbatches: int, replicas: object, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        create(name, num_ranks=num_ranks, num_microbatches=num_microbatches, replicas=replicas)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("counts", "fewest"),
    [((2, 1), 2), ((1, 2), 2), ((3, 2), 3), ((2, 2), 2), ((1, 2, 1), 4), ((1, 1, 1), 2), ((1, 4), 4), ((1,), 1)],
)
def test_fewest_microbatches_of_2bw(counts: Counts, fewest: int) -> None:
    """From there on all go, also those that the replicas do not divide."""
    assert least("2bw", counts) == fewest
    for num_microbatches in range(fewest, fewest + 6):
        verify(asynchronous("2bw", counts, num_microbatches).program(5))


def test_a_version_too_early_is_refused() -> None:
    """With one microbatch fewer than the fewest, 2bw would read what does not exist."""

    class Eager(type(create("2bw", num_ranks=1, num_microbatches=1))):  # type: ignore[misc]
        def check(self) -> None:
            pass

    with pytest.raises(ScheduleError) as caught:
        Eager(num_ranks=4, num_microbatches=3, replicas=(1, 2, 1)).program(4)
    assert caught.value.rule in ("version not made", "circular wait")
