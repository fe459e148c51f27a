"""The flags that select a schedule, for any trainer's parser."""

import argparse
import sys
from pathlib import Path

import pytest

from stagewright.schedules import Schedule, ScheduleError, add_arguments, create, from_arguments, names, registry


def schedule_of(*flags: str, **options: object) -> Schedule:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    add_arguments(parser)
    return from_arguments(parser.parse_args(flags), **options)


def test_the_defaults_are_1f1b_on_two_ranks_with_two_microbatches_a_rank() -> None:
    assert schedule_of() == create("1f1b", num_ranks=2, num_microbatches=4)
    assert schedule_of("--ranks", "8") == create("1f1b", num_ranks=8, num_microbatches=16)
    parser = argparse.ArgumentParser()
    add_arguments(parser, schedule="gpipe", num_ranks=3)
    assert from_arguments(parser.parse_args([])) == create("gpipe", num_ranks=3, num_microbatches=6)


def test_both_families_of_flags_say_the_same() -> None:
    wanted = create("gpipe", num_ranks=4, num_microbatches=8)
    assert schedule_of("--schedule", "gpipe", "--ranks", "4", "--microbatches", "8") == wanted
    megatron = ("--schedule", "gpipe", "--ranks", "4", "--micro-batch-size", "2", "--global-batch-size", "16")
    assert schedule_of(*megatron) == wanted
    assert schedule_of(*megatron, "--microbatches", "8") == wanted, "both may be given where they agree"


def test_chunks_and_further_options_reach_the_schedule() -> None:
    flags = ("--schedule", "interleaved", "--ranks", "2", "--microbatches", "4", "--chunks", "3")
    assert schedule_of(*flags) == create("interleaved", num_ranks=2, num_microbatches=4, num_chunks=3)
    assert schedule_of("--schedule", "gpipe", last_first=True) == create(
        "gpipe", num_ranks=2, num_microbatches=4, last_first=True
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--micro-batch-size", "2"), "--micro-batch-size needs --global-batch-size beside it"),
        (
            ("--micro-batch-size", "3", "--global-batch-size", "16"),
            "the global batch is a whole number of microbatches: got --global-batch-size 16 with --micro-batch-size 3",
        ),
        (("--micro-batch-size", "0", "--global-batch-size", "16"), "--global-batch-size 16 with --micro-batch-size 0"),
        (("--micro-batch-size", "-2", "--global-batch-size", "16"), "--micro-batch-size -2"),
        (
            ("--micro-batch-size", "2", "--global-batch-size", "16", "--microbatches", "4"),
            "--microbatches 4 contradicts 16 / 2 = 8; give one of them",
        ),
        (
            ("--micro-batch-size", "2", "--global-batch-size", "0"),
            "num_microbatches is a whole number from 1 up: got 0",
        ),
        (("--schedule", "1f2b"), "there is no schedule '1f2b'; did you mean 1f1b"),
        (("--ranks", "0", "--microbatches", "4"), "num_ranks is a whole number from 1 up: got 0"),
        (("--microbatches", "0"), "num_microbatches is a whole number from 1 up: got 0"),
        (("--chunks", "2"), "1f1b gives each rank 1"),
        (("--schedule-module", "no_such_module_here"), "--schedule-module no_such_module_here: No module named"),
    ],
)
def test_flags_that_contradict_each_other_or_select_nothing(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedule_of(*flags)
    assert message in str(caught.value)


def test_a_module_of_ones_own_is_imported_for_the_schedules_it_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_lockstep_schedule.py").write_text(
        """
from dataclasses import dataclass
from stagewright.schedules import Schedule, register
from stagewright.schedules.instructions import Backward, Forward

@register
@dataclass(frozen=True)
class Mine(Schedule):
    name = "my-lockstep"
    summary = "one microbatch after the other"

    def order(self, rank):
        return [kind(rank, m) for m in range(self.num_microbatches) for kind in (Forward, Backward)]
"""
    )
    monkeypatch.setattr(registry, "_SCHEDULES", dict(registry._SCHEDULES))
    monkeypatch.syspath_prepend(tmp_path)
    assert "my-lockstep" not in names()
    schedule = schedule_of("--schedule-module", "my_lockstep_schedule", "--schedule", "my-lockstep", "--ranks", "3")
    assert (schedule.name, schedule.num_ranks, schedule.num_microbatches) == ("my-lockstep", 3, 6)
    assert schedule.program().num_stages == 3
    del sys.modules["my_lockstep_schedule"]
