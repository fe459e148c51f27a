"""The command lines of the benches: what cannot be measured is refused before anything starts."""

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from stagewright.bench import asynchronous, bubble, gpu, memory, overhead, prediction, schedules, throughput
from stagewright.bench.__main__ import main
from stagewright.bench.report import Section

Main = Callable[[Sequence[str]], int]


@pytest.mark.parametrize(
    ("bench", "arguments"),
    [
        (bubble.main, ["--steps", "0"]),
        (bubble.main, ["--only", "no-such-schedule"]),
        (memory.main, ["--steps", "-1"]),
        (throughput.main, ["--steps", "0"]),
        (overhead.main, ["--rounds", "0"]),
        (prediction.main, ["--rounds", "0"]),
        (prediction.main, ["--steps", "-1"]),
        (prediction.main, ["--forward", "nan"]),
        (prediction.main, ["--only", "no-such-schedule"]),
        (asynchronous.main, ["--batches", "0"]),
        (schedules.main, ["--ranks", "0"]),
        (schedules.main, ["--chunks", "-1"]),
        (gpu.main, ["--minutes", "0"]),
        (gpu.main, ["--only", "no-such-schedule"]),
    ],
)
def test_what_cannot_be_measured_is_refused(
    bench: Main, arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench(arguments)
    assert arguments[-1] in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_refused_before_minutes_are_spent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["memory", "--out", str(tmp_path / "file" / "report")])
    assert "cannot write a report to" in capsys.readouterr().err


def interrupted(track: object) -> Section:
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_ctrl_c_ends_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubble, "measure", interrupted)
    monkeypatch.setattr("sys.argv", ["stagewright.bench", "bubble", "--out", str(tmp_path / "report")])
    with pytest.raises(SystemExit, match="130"):
        runpy.run_module("stagewright.bench", run_name="__main__")
    assert not list((tmp_path / "report").iterdir())
