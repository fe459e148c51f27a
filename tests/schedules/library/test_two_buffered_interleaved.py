"""2BW over several stages a rank: two versions are enough, at every shape, with drains anywhere."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.schedules import Costs, ScheduleError, create, simulate, verify
from stagewright.schedules.asynchronous import AsynchronousSchedule
from stagewright.schedules.instructions import Backward, Forward, ReduceTied, Step, SyncScalars
from stagewright.schedules.library import InterleavedDoubleBuffered
from stagewright.schedules.proof import SEMANTICS
from stagewright.schedules.windows import Windows


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2, **options: object) -> AsynchronousSchedule:
    schedule = create(
        "2bw-interleaved",
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        **options,
    )
    assert isinstance(schedule, InterleavedDoubleBuffered)
    return schedule


def shapes() -> Iterator[AsynchronousSchedule]:
    for num_ranks in range(1, 6):
        for num_chunks in range(1, 4):
            for num_microbatches in range(max(num_ranks - 1, 1), 2 * num_ranks + 4):
                yield interleaved(num_ranks, num_microbatches, num_chunks)


def test_first_window_of_the_first_rank() -> None:
    """The forwards of a group on all chunks but the last, and three more; then a backward behind each forward."""
    schedule = interleaved(4, 4)
    assert " ".join(map(str, schedule.window(3, 0))) == (
        "3F0@0 3F1@0 3F2@0 3F3@0 7F0@0 7B0@0 7F1@0 7B1@0 7F2@0 7B2@0 7F3@0 7B3@0"
    )
    assert " ".join(map(str, schedule.window(0, 1))) == (
        "0F4@0 4B1@0 0F5@0 4B2@0 0F6@0 4B3@0 0F7@0 0B0@0 "
        "4F4@0 0B1@0 4F5@0 0B2@0 4F6@0 0B3@0 0STEP@1 4STEP@1 4F7@0 4B4@0"
    )


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_every_shape_is_legal(semantics: str) -> None:
    """Two versions are kept, gradients are one update old, and no rank waits in a circle."""
    for schedule in shapes():
        program = schedule.program(5)
        assert program.updates.num_versions == (2,) * schedule.num_ranks
        assert program.updates.max_staleness == 1
        verify(program, semantics=semantics)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_windows_with_drains_anywhere_are_legal(data: st.DataObject) -> None:
    """Also where updates wait for what other ranks know, and where stages share a weight."""
    num_ranks = data.draw(st.integers(1, 5))
    num_chunks = data.draw(st.integers(1, 3))
    num_microbatches = data.draw(st.integers(max(num_ranks - 1, 1), 3 * num_ranks))
    schedule = interleaved(num_ranks, num_microbatches, num_chunks)
    tied = frozenset({0, schedule.num_stages - 1}) if data.draw(st.booleans()) and schedule.num_stages > 1 else ()
    windows = Windows(schedule, frozenset(tied), scalars=data.draw(st.booleans()))
    gaps = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    program = windows.program([sum(gaps[: count + 1]) for count in range(len(gaps))])
    for semantics in SEMANTICS:
        verify(program, semantics=semantics)


def test_stages_of_a_rank_are_updated_together() -> None:
    """Where one of them waits for other ranks, all do; what all ranks must know is told once."""
    program = Windows(interleaved(2, 2), frozenset({0, 3}), scalars=True).program([4])
    verify(program)
    for rank, stream in enumerate(program.streams):
        stages = program.placement.stages_of(rank)
        updates = [item for item in stream if isinstance(item, ReduceTied | SyncScalars | Step)]
        tied = [ReduceTied(stage) for stage in stages if stage in (0, 3)]
        told = [[*tied, SyncScalars()] for _ in range(4)]
        made = [[Step(stage, version) for stage in stages] for version in range(1, 5)]
        assert updates == [item for pair in zip(told, made) for part in pair for item in part]
        for version in range(1, 5):
            first, last = (stream.index(Step(stage, version)) for stage in stages)
            assert not any(isinstance(item, Forward | Backward) for item in stream[first:last])


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "num_chunks"), [(1, 1, 2), (2, 2, 2), (4, 4, 3), (3, 7, 2)])
def test_no_bubble_in_the_steady_state(num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    """A batch takes M(F+B) on each of the V stages; (V-1)N + P-r are stashed."""
    schedule = interleaved(num_ranks, num_microbatches, num_chunks)
    costs = Costs(forward=1.25, backward=2.5)
    timeline = simulate(schedule.program(8), costs)
    formula = schedule.bubble_formula(costs)
    assert formula is not None
    assert timeline.steady_period == num_microbatches * num_chunks * 3.75 == formula.ideal
    assert formula.agrees_with(timeline)
    stash = (num_chunks - 1) * schedule.group + num_ranks
    assert timeline.peak_stash == tuple(stash - rank for rank in range(num_ranks))


@pytest.mark.parametrize(
    ("num_ranks", "backward", "busy"),
    [(2, 1, True), (2, 2, False), (3, 2, True), (3, 3, False), (3, 0.5, True), (3, 0.25, False)],
)
def test_one_microbatch_fewer_than_ranks_comes_round_in_time_or_not(
    num_ranks: int, backward: float, busy: bool
) -> None:
    schedule, costs = interleaved(num_ranks, num_ranks - 1), Costs(forward=1, backward=backward)
    period = simulate(schedule.program(10), costs).steady_period
    ideal = 2 * (num_ranks - 1) * (1 + backward)
    assert (period == pytest.approx(ideal)) is busy
    assert (schedule.bubble_formula(costs) is not None) is busy


def test_the_lag_of_interleaved_would_need_more_microbatches() -> None:
    """With 2(P-1-r) forwards in advance of the steady state a version is read before it is made."""

    class Eager(InterleavedDoubleBuffered):
        def num_warmup(self, rank: int) -> int:
            return super().num_warmup(rank) + self.num_ranks - 1 - rank

    with pytest.raises(ScheduleError, match="reads weight version 1, while the newest is 0") as refusal:
        Eager(4, 4, num_chunks=2).program(3)
    assert refusal.value.rule == "version not made"
    Eager(4, 6, num_chunks=2, group_size=6).program(3)


def test_refusals() -> None:
    with pytest.raises(
        ScheduleError, match="2bw-interleaved needs at least P - 1 microbatches.*got 2 on 4 ranks; use 3"
    ):
        interleaved(4, 2)
    with pytest.raises(ScheduleError, match=r"2bw-interleaved takes groups of N >= P microbatches"):
        interleaved(4, 8, group_size=3)


def test_one_chunk_is_plain_2bw() -> None:
    plain, one = create("2bw", num_ranks=3, num_microbatches=4), interleaved(3, 4, 1)
    assert one.program(5).streams == plain.program(5).streams
