"""The bench of asynchronous pipelines: what it measures and prints; no time is asserted."""

from functools import partial

import pytest
import torch
from torch import nn

from stagewright.bench import asynchronous, stages
from stagewright.bench.__main__ import OTHERS, SECTIONS
from stagewright.bench.asynchronous import Case, cells_of, gain, measure, period_of, sleep_stage
from stagewright.bench.stages import SleepStage, WorkStage

CASE = Case("sleep", 4, 8, partial(sleep_stage, 0.0, 0.0), rows=8, width=8, barred=True)


def test_a_period_is_that_of_the_slowest_rank() -> None:
    """From the end of the last batch that is dropped to that of the last one."""
    assert period_of([[10.0, 11.0, 12.0, 13.0], [10.5, 11.0, 12.5, 15.0]]) == 1.5


def test_the_gain_is_that_of_the_medians() -> None:
    assert gain({"1f1b": [3.0, 1.0, 2.0], "2bw": [1.0, 5.0, 0.5]}) == 2.0


def test_a_line_tells_the_share_of_the_ideal() -> None:
    """(8 + 4 - 1) / 8 = 1.375 is all there is to gain."""
    cells = cells_of(CASE, {"1f1b": [0.33, 0.34, 0.35], "2bw": [0.25, 0.25, 0.24]})
    assert [str(cell) for cell in cells] == [
        "sleep", "4", "8", "340.0 (330.0 .. 350.0)", "250.0 (240.0 .. 250.0)", "1.360", "1.375", "98.9%"
    ]  # fmt: skip
    assert str(cells_of(CASE, {"1f1b": [1.3], "2bw": [1.0]})[-1]) == "94.5% !"


@pytest.mark.slow
def test_both_schedules_are_measured_by_turns() -> None:
    case = Case("sleep", 2, 2, partial(sleep_stage, 0.0, 0.0), rows=2, width=8, barred=True)
    periods = measure(case, num_batches=2, num_rounds=3)
    assert set(periods) == {"1f1b", "2bw"}
    assert all(len(of_schedule) == 3 and min(of_schedule) > 0 for of_schedule in periods.values())


def test_a_sleeping_stage_takes_its_time_both_ways_and_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PretendedTime()
    monkeypatch.setattr(stages, "time", clock)
    stage, x = SleepStage(0.25, 0.5), torch.randn(3, 8, requires_grad=True)
    output = stage(x)
    assert torch.equal(output, stage.linear(x))
    assert clock.perf_counter() == pytest.approx(0.25, abs=1e-4)
    output.sum().backward()
    assert clock.perf_counter() == pytest.approx(0.75, abs=1e-4)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, stage.linear.weight.sum(0).expand(3, 8))
    assert sum(clock.slept) == pytest.approx(0.75 - 2 * stages.AWAKE_SECONDS, abs=1e-4)


def test_the_backward_of_a_first_stage_takes_its_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PretendedTime()
    monkeypatch.setattr(stages, "time", clock)
    SleepStage(0.0, 0.5)(torch.randn(3, 8)).sum().backward()
    assert clock.perf_counter() == pytest.approx(0.5, abs=1e-4)


class PretendedTime:
    """Goes on when somebody sleeps, and a little with every look at the clock."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


def test_working_stages_are_as_deep_as_asked_for() -> None:
    stage = WorkStage(num_layers=3, width=4)
    assert stage(torch.zeros(2, 4)).shape == (2, 4)
    assert sum(isinstance(module, nn.Linear) for module in stage.modules()) == 3


def test_a_missed_bar_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for ratio, code in ((1.0, 1), (2.0, 0)):
        monkeypatch.setattr(asynchronous, "measure", partial(measured, ratio))
        assert asynchronous.main(["--rounds", "1"]) == code
        text = capsys.readouterr().out
        assert "1 rounds of 10 batches" in text
        assert ("!" in text.splitlines()[4]) == bool(code)


def measured(ratio: float, case: Case, num_batches: int, num_rounds: int) -> dict[str, list[float]]:
    return {"1f1b": [ratio], "2bw": [1.0]}


def test_it_runs_where_it_is_named() -> None:
    assert set(OTHERS) == {"asynchronous", "gpu", "prediction", "split_backward", "staleness"}
    assert not set(OTHERS) & set(SECTIONS)


@pytest.mark.parametrize(("rank", "processor"), [(0, 2), (1, 5), (2, 7), (3, 2)])
def test_ranks_share_the_processors_there_are(rank: int, processor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[int, set[int]]] = []
    monkeypatch.setattr(stages.os, "sched_getaffinity", lambda process: {7, 2, 5})
    monkeypatch.setattr(stages.os, "sched_setaffinity", lambda process, processors: kept.append((process, processors)))
    stages.stay_on_one_processor(rank)
    assert kept == [(0, {processor})]
