"""Schedules by name."""

from dataclasses import dataclass
from typing import ClassVar

import numpy
import pytest

from stagewright.schedules import Schedule, ScheduleError, create, find, names, register, registry, verify
from stagewright.schedules.instructions import Backward, Forward
from stagewright.schedules.library import OneFOneB
from stagewright.schedules.registry import schedules
from stagewright.schedules.schedule import Order


def test_every_name_and_alias_finds_its_schedule() -> None:
    assert len(set(names())) == len(names())
    for name, schedule in schedules().items():
        assert find(name) is schedule
        assert find(f"  {name.upper().replace('-', '_')} ") is schedule
    for name in names():
        assert find(name).name == name
        assert find(name).summary


@pytest.mark.parametrize(
    ("alias", "name"),
    [("pipedream-flush", "1f1b"), ("dapple", "1f1b"), ("PipeDream_Flush", "1f1b"), ("pipedream-2bw", "2bw")],
)
def test_the_papers_names(alias: str, name: str) -> None:
    assert find(alias) is find(name)
    assert alias not in names()


@pytest.mark.parametrize(
    ("wrong", "suggested"), [("1f2b", "1f1b"), ("gpip", "gpipe"), ("pipe-dream", "pipedream"), ("zb-h11", "zb-h1")]
)
def test_an_unknown_name_is_answered_with_close_ones(wrong: str, suggested: str) -> None:
    with pytest.raises(ScheduleError, match=rf"there is no schedule '{wrong}'; did you mean .*\b{suggested}\b.*\?"):
        create(wrong, num_ranks=2, num_microbatches=2)


def test_a_name_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(ScheduleError) as caught:
        find("qqqqqq")
    assert all(name in str(caught.value) for name in names())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpipe", {"last_frist": True}, "gpipe has no option 'last_frist': it takes last_first"),
        ("none", {"colour": 1}, "none has no option 'colour': it takes "),
        ("gpipe", {"num_chunks": 2}, r"gpipe gives each rank 1 stage\(s\): got num_chunks=2; leave it out"),
        ("gpipe", {"num_chunks": 0}, r"gpipe gives each rank 1 stage\(s\): got num_chunks=0"),
    ],
)
def test_options_that_a_schedule_does_not_take(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        create(name, num_ranks=2, num_microbatches=4, **options)


def test_the_number_of_chunks_that_it_has_anyway_is_accepted() -> None:
    plain = create("1f1b", num_ranks=3, num_microbatches=4)
    assert create("1f1b", num_ranks=3, num_microbatches=4, num_chunks=1) == plain


@pytest.mark.parametrize("count", [0, -1, 2.0, "2", True, None])
@pytest.mark.parametrize("field", ["num_ranks", "num_microbatches"])
def test_counts_are_whole_numbers_from_one_up(field: str, count: object) -> None:
    shape = {"num_ranks": 2, "num_microbatches": 2} | {field: count}
    with pytest.raises(ScheduleError, match=f"{field} is a whole number from 1 up: got {count!r}"):
        create("1f1b", **shape)  # type: ignore[arg-type]


@pytest.fixture
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_SCHEDULES", dict(registry._SCHEDULES))


@pytest.mark.usefixtures("empty_registry")
def test_a_schedule_of_ones_own_works_wherever_a_name_does() -> None:
    @register
    @dataclass(frozen=True)
    class Lockstep(Schedule):
        """One microbatch after the other."""

        name: ClassVar[str] = "lockstep"
        aliases: ClassVar[tuple[str, ...]] = ("one-at-a-time",)
        summary: ClassVar[str] = "one microbatch after the other"

        def order(self, rank: int) -> Order:
            """F and B of each microbatch."""
            return [kind(rank, m) for m in range(self.num_microbatches) for kind in (Forward, Backward)]

    assert "lockstep" in names()
    assert find("One_At_A_Time") is Lockstep
    program = create("lockstep", num_ranks=3, num_microbatches=2).program()
    assert [str(i) for i in program.streams[2] if "RECV" not in str(i)] == [
        *("2F0", "2B0", "2SEND_B0", "2F1", "2B1", "2SEND_B1", "2STEP@1")
    ]
    verify(program)
    assert register(Lockstep) is Lockstep, "the same class may come again, as when its module is reloaded"


@pytest.mark.usefixtures("empty_registry")
def test_aliases_are_not_handed_down() -> None:
    @register
    @dataclass(frozen=True)
    class Mine(OneFOneB):
        """1F1B under another name."""

        name: ClassVar[str] = "mine"
        summary: ClassVar[str] = "1f1b, derived"

    assert find("mine") is Mine
    assert find("dapple") is OneFOneB


@pytest.mark.usefixtures("empty_registry")
def test_a_name_belongs_to_one_schedule() -> None:
    @dataclass(frozen=True)
    class Other(Schedule):
        """Takes a name that is taken."""

        name: ClassVar[str] = "dapple"
        summary: ClassVar[str] = "none"

        def order(self, rank: int) -> Order:
            """Nothing."""
            return []

    with pytest.raises(ScheduleError, match="a name belongs to one schedule: 'dapple' is OneFOneB already"):
        register(Other)


def test_counts_may_come_from_numpy() -> None:
    schedule = create(
        "interleaved", num_ranks=numpy.int64(2), num_microbatches=numpy.int32(4), num_chunks=numpy.int8(2)
    )
    assert repr(schedule) == repr(create("interleaved", num_ranks=2, num_microbatches=4, num_chunks=2))
