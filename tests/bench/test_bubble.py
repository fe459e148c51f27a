"""The bench of bubbles: ideals, bars and rows from made-up steps, and stages that sleep when they should."""

from collections.abc import Sequence
from time import perf_counter

import pytest
import torch
from torch.distributed.pipelining import _backward as torch_backward

from stagewright.bench import bubble
from stagewright.bench.bubble import COSTS, Outcome, TorchHalvedSleepStage, in_some, schedules_of, section_of
from stagewright.cli.compare import share_of


def outcome(name: str, ours: Sequence[float], **others: Sequence[float]) -> Outcome:
    (schedule,) = schedules_of([name])
    return Outcome(schedule, COSTS.scaled(share_of(schedule)), {"ours": ours, **others})


@pytest.mark.parametrize(
    ("name", "ideal", "most"),
    [
        ("1f1b", 0.330, 0.04),
        ("gpipe", 0.330, 0.04),
        ("interleaved", 0.285, 0.07),
        ("zbv", 0.255, 0.07),
        ("2bw", 0.24, 0.04),
    ],
)
def test_ideals_and_bars(name: str, ideal: float, most: float) -> None:
    found = outcome(name, [1.0])
    assert found.ideal == pytest.approx(ideal)
    assert found.most == most


def test_over_and_bubble_of_a_step() -> None:
    found = outcome("1f1b", [0.3, 0.363, 0.4], torch=[0.396])
    assert found.over("ours") == pytest.approx(0.1)
    assert found.over("torch") == pytest.approx(0.2)
    assert found.over("by hand") is None
    assert found.bubble(0.330) == pytest.approx(3 / 11)


@pytest.mark.parametrize(("step", "hand", "misses"), [(0.340, 0.340, 0), (0.340, 0.333, 1), (0.350, 0.350, 1)])
def test_missed_bars_are_marked(step: float, hand: float, misses: int) -> None:
    section = section_of([outcome("1f1b", [step], **{"by hand": [hand]})])
    assert section.misses == misses
    assert section.bars["1f1b"]["ours"] == pytest.approx(100 * (step / 0.330 - 1))


def test_every_schedule_that_runs_in_this_shape_is_measured_once() -> None:
    names = [schedule.name for schedule in schedules_of(None)]
    assert {"gpipe", "1f1b", "interleaved", "zbv", "dualpipe", "chimera", "2bw", "pipedream"} <= set(names)
    assert [schedule.name for some in in_some(schedules_of(None)) for schedule in some] == names


def test_a_weight_gradient_sleeps_in_its_own_half_for_torch_too() -> None:
    stage = TorchHalvedSleepStage(0.0, 0.0, 0.02)
    x = torch.randn(1, 8, requires_grad=True)
    output = stage(x)
    started = perf_counter()
    _, groups = torch_backward.stage_backward_input([output], [torch.ones_like(output)], [x], stage.parameters())
    assert stage.linear.weight.grad is None
    halfway = perf_counter()
    torch_backward.stage_backward_weight(stage.parameters(), groups)
    assert perf_counter() - halfway >= 0.02
    assert halfway - started > 0
    assert stage.linear.weight.grad is not None


@pytest.mark.slow
def test_a_tiny_run() -> None:
    section = bubble.measure(["1f1b"], 1)
    (row,) = section.rows
    assert row[0] == "1f1b"
    assert set(section.bars["1f1b"]) == {"ours", "torch", "by hand"}
