"""Programs from elsewhere run as ours do: torch's CSV files, our own written and read again, a user's schedule."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from plain import assert_same, train_pipelined, train_plainly

from stagewright.engine import launch_local
from stagewright.schedules import Program, create, registry

DATA = Path(__file__).parent.parent / "data"
ROWS, STEPS = 11, 2


def assert_trains_as_plainly(program: Program) -> None:
    results = launch_local(
        train_pipelined, program.num_ranks, backend="threads", args=(ROWS, STEPS, {"schedule": program})
    )
    assert_same(results, train_plainly(program.num_stages, ROWS, STEPS))


@pytest.mark.parametrize("file", sorted((DATA / "streams").glob("*.csv")), ids=lambda file: file.stem)
def test_computations_alone(file: Path) -> None:
    """Communication and updates are added by us."""
    assert_trains_as_plainly(Program.from_csv(file.read_text()))


@pytest.mark.parametrize("file", sorted((DATA / "torch").glob("*.csv")), ids=lambda file: file.stem)
def test_what_torch_writes(file: Path) -> None:
    """Its sends and receives as they are, and its REDUCE_GRAD, UNSHARD and RESHARD, which find nothing to do here."""
    assert_trains_as_plainly(Program.from_csv(file.read_text()))


@pytest.mark.parametrize("name", ["1f1b", "interleaved-zb", "dualpipe", "dualpipev"])
def test_our_own_written_and_read_again(name: str) -> None:
    program = create(name, num_ranks=2, num_microbatches=8).program()
    assert "STEP" in program.to_csv()
    assert_trains_as_plainly(Program.from_csv(program.to_csv()))


USERS_MODULE = '''
from dataclasses import dataclass

from stagewright.schedules import Schedule, register
from stagewright.schedules.instructions import Backward, Forward


@register
@dataclass(frozen=True)
class TwoByTwo(Schedule):
    """Two forwards, two backwards."""

    name = "two-by-two"
    summary = "two forwards, two backwards, and so on"

    def order(self, rank):
        pairs = [range(first, min(first + 2, self.num_microbatches)) for first in range(0, self.num_microbatches, 2)]
        return [
            instruction
            for pair in pairs
            for kind in (Forward, Backward)
            for instruction in (kind(rank, microbatch) for microbatch in pair)
        ]
'''


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "users_schedule.py").write_text(USERS_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("users_schedule")
    yield
    del registry._SCHEDULES["two-by-two"], sys.modules["users_schedule"]


@pytest.mark.usefixtures("users_module")
def test_a_schedule_of_the_user_by_its_name() -> None:
    options = {"schedule": "two-by-two", "num_microbatches": 5}
    results = launch_local(train_pipelined, 3, backend="threads", args=(ROWS, STEPS, options))
    assert_same(results, train_plainly(3, ROWS, STEPS))
