"""The benches against peers: the same work in every way, and ratios of made-up numbers; no time is asserted."""

import pytest
import torch
from peers_trained import weights_by_way

from stagewright.bench import overhead, throughput
from stagewright.bench.paired import Ratio, Round, Turn, together
from stagewright.engine import launch_local
from stagewright.schedules import create


def test_a_round_lasts_from_the_first_start_to_the_last_end() -> None:
    of_ranks = [{"ours": [Turn(1.0, 3.0, 0.5)]}, {"ours": [Turn(0.5, 2.0, 0.25)]}]
    assert together(of_ranks) == {"ours": [Round(wall=2.5, cpu=0.75)]}


def test_ratios_are_taken_round_by_round() -> None:
    ratio = Ratio.of([1.0, 4.0, 9.0], [2.0, 4.0, 3.0])
    assert ratio.median == 1.0
    assert (ratio.low, ratio.high) == (0.5, 3.0)


def outcome(schedule: str, ours: float, torch: float) -> overhead.Outcome:
    rounds = {"ours": [Round(1.0, ours)], "torch": [Round(2.0, torch)]}
    return overhead.Outcome(schedule, num_instructions=100, num_steps=10, rounds=rounds)


def test_cpu_counts_per_instruction_and_wall_per_instruction_of_a_rank() -> None:
    found = outcome("1f1b", 0.7, 1.0)
    assert found.cpu("ours") == pytest.approx(0.7e-3)
    assert found.wall("torch") == pytest.approx(4e-3)


@pytest.mark.parametrize(
    ("schedule", "ratio", "misses"),
    [("1f1b", 0.75, 0), ("1f1b", 0.76, 1), ("zbv", 0.5, 0), ("zbv", 0.6, 1), ("bfs", 2.0, 0)],
)
def test_each_schedule_has_its_bar(schedule: str, ratio: float, misses: int) -> None:
    assert overhead.section_of([outcome(schedule, ratio, 1.0)], None).misses == misses


@pytest.mark.parametrize(("plain", "misses"), [(1.0, 0), (0.9, 1)])
def test_a_plain_loop_has_its_bar(plain: float, misses: int) -> None:
    rounds = {"ours": [Round(1.02, 1.0)], "plain": [Round(plain, 1.0)]}
    assert overhead.section_of([], rounds).misses == misses


@pytest.mark.parametrize(
    ("ours", "closed", "holds"), [(9.7, 0.06, True), (9.9, 0.02, False), (8.0, 0.4, True), (5.0, 1.0, True)]
)
def test_a_step_is_faster_than_torchs_or_nearer_to_the_ideal(ours: float, closed: float, holds: bool) -> None:
    found = throughput.Outcome("1f1b", ideal=5.0, ours=[ours], torch=[10.0])
    assert found.closed == pytest.approx(closed)
    assert found.holds == holds
    assert throughput.section_of([found]).misses == (not holds)


def test_half_of_a_small_distance_is_enough() -> None:
    assert throughput.Outcome("1f1b", ideal=9.8, ours=[9.85], torch=[10.0]).holds


def test_nobody_closes_a_distance_that_torch_does_not_have() -> None:
    assert not throughput.Outcome("1f1b", ideal=10.5, ours=[10.2], torch=[10.0]).holds


@pytest.mark.slow
def test_all_ways_train_alike() -> None:
    """What is compared is the same work."""
    first, second = launch_local(weights_by_way, 2)
    for way in ("ours", "torch", "gpipe by hand", "1f1b by hand"):
        torch.testing.assert_close(first[way] + second[way], first["plain"])


def test_all_instructions_are_counted() -> None:
    program = create("gpipe", num_ranks=2, num_microbatches=8).program()
    assert overhead.num_instructions(program) == 2 * 8 * 2 + 4 * 8 + 2  # computations, messages, updates
