"""The bench of memory: what is predicted of one microbatch, and what is marked."""

import sys

import pytest
import torch

from stagewright.bench.bubble import schedules_of
from stagewright.bench.memory import Allocator, Outcome, Seen, costs_of_one, measure, section_of, splits_backward
from stagewright.schedules import create

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc tells what it has handed out")

MIB = 2**20


def test_the_allocator_sees_tensors_come_and_go() -> None:
    allocator = Allocator()
    before = allocator.num_bytes
    tensor = torch.empty(MIB, dtype=torch.uint8)
    assert abs(allocator.num_bytes - before - tensor.nbytes) < 4096
    del tensor
    assert abs(allocator.num_bytes - before) < 4096


def test_a_full_backward_keeps_nothing_for_w_and_a_split_one_does() -> None:
    full, split = costs_of_one(False), costs_of_one(True)
    assert isinstance(full.weight_bytes, int)
    assert isinstance(split.weight_bytes, int)
    assert abs(full.weight_bytes) < 4096
    assert split.weight_bytes > MIB / 2


def outcome(seen: Seen) -> Outcome:
    (schedule,) = schedules_of(["1f1b"])
    return Outcome(schedule, [4], [MIB], [seen])


@pytest.mark.parametrize(
    ("seen", "misses"),
    [
        (Seen(4, MIB, 2, 2), 0),
        (Seen(5, MIB, 2, 2), 1),
        (Seen(4, MIB + MIB // 20, 2, 2), 1),
        (Seen(4, MIB, 3, 2), 1),
    ],
)
def test_what_is_not_as_predicted_is_marked(seen: Seen, misses: int) -> None:
    assert section_of([outcome(seen)], 0).misses == misses


def test_growth_is_marked() -> None:
    assert section_of([], 2**20).misses == 1


def test_the_note_says_in_how_many_steps() -> None:
    """It said 200 whatever ``--steps`` was."""
    assert "in 50 steps of 1f1b" in section_of([], 0, 50).note


def test_programs_that_split_the_backward() -> None:
    assert splits_backward(create("zb-h1", num_ranks=4, num_microbatches=8).program())
    assert not splits_backward(create("1f1b", num_ranks=4, num_microbatches=8).program())


@pytest.mark.slow
def test_a_tiny_run_holds_as_many_entries_as_predicted() -> None:
    (row, _) = measure(["1f1b"], 0).rows
    assert row[:3] == ("1f1b", "4 3 2 1", "4 3 2 1")
