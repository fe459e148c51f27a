"""Asynchronous schedules: windows and drains, and which weights each gradient was computed with."""

from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.schedules import Costs, ScheduleError, create, simulate, verify
from stagewright.schedules.asynchronous import AsynchronousSchedule, Work
from stagewright.schedules.instructions import Backward, Forward, Step

EVERY = [("2bw", {}), ("pipedream", {}), ("pipedream", {"vertical_sync": True})]


def asynchronous(name: str, num_ranks: int, num_microbatches: int, **options: object) -> AsynchronousSchedule:
    schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    assert isinstance(schedule, AsynchronousSchedule)
    return schedule


def tokens(work: Sequence[Work]) -> str:
    return " ".join(map(str, work))


def run(schedule: AsynchronousSchedule, rank: int, drains: Sequence[bool]) -> Iterator[Work]:
    """The work of one window per entry, each followed by a drain where the entry is true, and a drain at the end."""
    num_drained = 0
    for batch, drain in enumerate(drains):
        yield from schedule.window(rank, batch, num_drained)
        if drain or batch == len(drains) - 1:
            yield from schedule.drain(rank, batch + 1, num_drained)
            num_drained = batch + 1


def staleness(work: Sequence[Work]) -> list[list[int]]:
    """For each update, by how many updates the weights of each of its gradients lag behind."""
    lags: list[list[int]] = []
    versions: list[int] = []
    for instruction in work:
        match instruction:
            case Backward(version=int(version)):
                versions.append(version)
            case Step(version=made):
                lags.append([made - 1 - version for version in versions])
                versions = []
    return lags


def test_windows_of_2bw() -> None:
    schedule = asynchronous("2bw", 3, 3)
    assert [tokens(schedule.window(0, batch)) for batch in range(3)] == [
        "0F0@0 0F1@0 0F2@0 0B0@0",
        "0F3@0 0B1@0 0F4@0 0B2@0 0STEP@1 0F5@0 0B3@0",
        "0F6@1 0B4@0 0F7@1 0B5@0 0STEP@2 0F8@1 0B6@1",
    ]
    assert tokens(schedule.drain(0, 3)) == "0B7@1 0B8@1 0STEP@3"
    assert tokens(schedule.window(2, 2)) == "2F6@1 2B6@1 2F7@1 2B7@1 2F8@1 2B8@1 2STEP@3"
    assert schedule.drain(2, 3) == []


def test_2bw_goes_on_after_a_drain_with_the_older_version() -> None:
    schedule = asynchronous("2bw", 3, 3)
    assert tokens(schedule.window(1, 3, num_drained=3)) == "1F9@2 1F10@2 1B9@2 1F11@2 1B10@2"
    assert tokens(schedule.drain(1, 4, num_drained=3)) == "1B11@2 1STEP@4"


def test_windows_of_pipedream() -> None:
    schedule = asynchronous("pipedream", 3, 2)
    assert [tokens(schedule.window(0, batch)) for batch in range(3)] == [
        "0F0@0 0F1@0",
        "0F2@0 0B0@0 0STEP@1 0F3@1 0B1@0 0STEP@2",
        "0F4@2 0B2@0 0STEP@3 0F5@3 0B3@1 0STEP@4",
    ]
    assert tokens(schedule.drain(0, 3)) == "0B4@2 0STEP@5 0B5@3 0STEP@6"
    assert tokens(schedule.window(2, 1)) == "2F2@2 2B2@2 2STEP@3 2F3@3 2B3@3 2STEP@4"
    assert tokens(schedule.window(1, 3, num_drained=3)) == "1F6@6 1F7@6 1B6@6 1STEP@7"


def test_vertical_sync_takes_the_version_of_the_first_rank() -> None:
    schedule = asynchronous("pipedream", 3, 2, vertical_sync=True)
    assert tokens(schedule.window(2, 1)) == "2F2@0 2B2@0 2STEP@3 2F3@1 2B3@1 2STEP@4"


def test_delays_of_pipedream() -> None:
    """Update j lags min(j, P-1-r) behind: the first rank most, the last one never."""
    schedule = asynchronous("pipedream", 4, 3)
    lags = [staleness(list(run(schedule, rank, [False, False]))) for rank in range(4)]
    assert lags[0] == [[0], [1], [2], [3], [3], [3]]
    assert lags[1] == [[0], [1], [2], [2], [2], [2]]
    assert lags[3] == [[0], [0], [0], [0], [0], [0]]


def test_rule_of_2bw_on_one_parameter() -> None:
    """The loss w^2/2 has gradient w: W(t+1) = W(t) - lr W(t-1) gives 1, .9, .8, .71, .63, …"""
    schedule = asynchronous("2bw", 4, 4)
    for rank in range(4):
        weights = [Fraction(1)]
        gradient = Fraction(0)
        for instruction in run(schedule, rank, [False] * 5):
            match instruction:
                case Backward(version=int(version)):
                    gradient += weights[version] / 4
                case Step(version=version):
                    assert version == len(weights)
                    weights.append(weights[-1] - gradient / 10)
                    gradient = Fraction(0)
        assert [float(weight) for weight in weights] == [1, 0.9, 0.8, 0.71, 0.63, 0.559]


@pytest.mark.parametrize(("name", "options"), EVERY)
@settings(max_examples=60, deadline=None)
@given(
    num_ranks=st.integers(1, 6),
    num_microbatches=st.integers(1, 8),
    drains=st.lists(st.booleans(), min_size=1, max_size=5),
)
def test_versions_of_every_run(
    name: str, options: dict[str, object], num_ranks: int, num_microbatches: int, drains: list[bool]
) -> None:
    """With any drains in between: versions exist, are still kept, agree, and are no staler than declared."""
    if name == "2bw":
        num_microbatches = max(num_microbatches, num_ranks - 1)
    schedule = asynchronous(name, num_ranks, num_microbatches, **options)
    rule = schedule.update_rule
    for rank in range(num_ranks):
        work = list(run(schedule, rank, drains))
        newest = 0
        forwards: list[tuple[int, int | None]] = []
        backwards: list[tuple[int, int | None]] = []
        for instruction in work:
            match instruction:
                case Forward(_, microbatch, version):
                    forwards.append((microbatch, version))
                case Backward(_, microbatch, version):
                    backwards.append((microbatch, version))
                case Step(_, made):
                    assert made == newest + 1
                    newest = made
            if not isinstance(instruction, Step):
                assert instruction.version is not None
                assert newest - rule.num_versions[rank] < instruction.version <= newest
        assert forwards == backwards
        assert [microbatch for microbatch, _ in forwards] == list(range(len(drains) * num_microbatches))
        assert newest == len(drains) * num_microbatches // rule.microbatches_per_update
        lags = staleness(work)
        assert {len(lag) for lag in lags} == {rule.microbatches_per_update}
        assert max(max(lag) for lag in lags) <= rule.max_staleness


@settings(max_examples=40, deadline=None)
@given(
    num_ranks=st.integers(1, 6),
    num_microbatches=st.integers(1, 8),
    drains=st.lists(st.booleans(), min_size=1, max_size=4),
)
def test_versions_across_ranks(num_ranks: int, num_microbatches: int, drains: list[bool]) -> None:
    """Under 2BW and under vertical sync a microbatch meets the same version on every rank."""
    same = [
        asynchronous("2bw", num_ranks, max(num_microbatches, num_ranks - 1)),
        asynchronous("pipedream", num_ranks, num_microbatches, vertical_sync=True),
    ]
    for schedule in same:
        used = [
            [(cell.microbatch, cell.version) for cell in run(schedule, rank, drains) if isinstance(cell, Forward)]
            for rank in range(num_ranks)
        ]
        assert all(versions == used[0] for versions in used)


@pytest.mark.parametrize(("name", "options"), EVERY)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_programs_are_legal(name: str, options: dict[str, object], steps: int) -> None:
    for num_ranks in range(1, 6):
        for num_microbatches in range(num_ranks - 1 if name == "2bw" else 1, 8):
            program = asynchronous(name, num_ranks, max(num_microbatches, 1), **options).program(steps=steps)
            verify(program, semantics="buffered")


def test_newest_version_before_a_drain() -> None:
    """After n windows the last rank has made n updates, the others one fewer."""
    schedule = asynchronous("2bw", 4, 4)
    for rank in range(4):
        work = [instruction for batch in range(3) for instruction in schedule.window(rank, batch)]
        made = [instruction.version for instruction in work if isinstance(instruction, Step)]
        assert made[-1] == (3 if rank == 3 else 2)


@pytest.mark.parametrize(("name", "options"), EVERY)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (2, 1), (4, 3), (4, 8), (5, 7)])
def test_no_bubble_in_the_steady_state(
    name: str, options: dict[str, object], num_ranks: int, num_microbatches: int
) -> None:
    """Once the pipeline is full, a batch takes M(F+B); stashes are those of 1F1B."""
    schedule = asynchronous(name, num_ranks, num_microbatches, **options)
    costs = Costs(forward=1.25, backward=2.5)
    longer, shorter = (simulate(schedule.program(steps=steps), costs) for steps in (8, 7))
    formula = schedule.bubble_formula(costs)
    assert longer.makespan - shorter.makespan == num_microbatches * 3.75 == formula.ideal
    assert (formula.idle, formula.measure) == (0, "steady")
    assert longer.peak_stash == tuple(num_ranks - rank for rank in range(num_ranks))


def test_update_rules() -> None:
    assert asynchronous("2bw", 4, 8).update_rule.num_versions == (2, 2, 2, 2)
    assert asynchronous("2bw", 4, 8).update_rule.max_staleness == 1
    assert asynchronous("pipedream", 4, 8).update_rule.num_versions == (4, 3, 2, 1)
    assert asynchronous("pipedream", 4, 8, vertical_sync=True).update_rule.num_versions == (4, 4, 4, 4)
    assert asynchronous("pipedream", 4, 8).update_rule.max_staleness == 3


def test_2bw_refuses_too_few_microbatches() -> None:
    with pytest.raises(ScheduleError) as refusal:
        create("2bw", num_ranks=5, num_microbatches=3)
    assert str(refusal.value) == (
        "2bw needs at least P - 1 microbatches, so that a batch's version exists when its first forward reads it: "
        "got 3 on 5 ranks; use 4 or more microbatches, or at most 4 ranks"
    )
    create("pipedream-2bw", num_ranks=5, num_microbatches=4)
    create("pipedream-2bw", num_ranks=4, num_microbatches=3)
