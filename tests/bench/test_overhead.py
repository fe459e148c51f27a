"""The benches against peers: the same work in every way, and ratios of made-up numbers; no time is asserted."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagewright.bench import overhead, throughput
from stagewright.bench.overhead import PlainLoop, tiny_stage
from stagewright.bench.paired import Ratio, Round, Turn, together
from stagewright.bench.peers import GPipeLoop, OneForwardOneBackwardLoop, TorchPeer, make_group, squared_error
from stagewright.engine import RankContext, launch_local
from stagewright.schedules import create

NUM_MICROBATCHES = 8


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


def _weights_by(context: RankContext, way: str) -> list[Tensor]:
    """The weights of this rank after two steps."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [tiny_stage(stage) for stage in range(2)]
    x, y = torch.randn(2, overhead.ROWS * NUM_MICROBATCHES, overhead.HIDDEN)
    own = copy.deepcopy(modules[context.rank])
    shape = (NUM_MICROBATCHES, squared_error)
    step: Any
    match way:
        case "ours":
            step = overhead.pipeline_of(context, "1f1b", {context.rank: own}).train_step
        case "torch":
            step = TorchPeer("1f1b", {context.rank: own}, 2, *shape, make_group()).step
        case "gpipe by hand":
            step = GPipeLoop(context, own, *shape, make_group()).step
        case "1f1b by hand":
            step = OneForwardOneBackwardLoop(context, own, *shape, make_group()).step
        case _:
            own = nn.Sequential(*modules)
            step = PlainLoop(own).step
    for _ in range(2):
        step(x, y)
    return [weight.detach() for weight in own.parameters()]


def _weights(context: RankContext) -> dict[str, list[Tensor]]:
    ways = ("ours", "torch", "gpipe by hand", "1f1b by hand", "plain")
    return {way: _weights_by(context, way) for way in ways}


def test_all_ways_train_alike() -> None:
    """What is compared is the same work."""
    first, second = launch_local(_weights, 2)
    for way in ("ours", "torch", "gpipe by hand", "1f1b by hand"):
        torch.testing.assert_close(first[way] + second[way], first["plain"])


def test_all_instructions_are_counted() -> None:
    program = create("gpipe", num_ranks=2, num_microbatches=8).program()
    assert overhead.num_instructions(program) == 2 * 8 * 2 + 4 * 8 + 2  # computations, messages, updates
