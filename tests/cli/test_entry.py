"""How the command starts and ends, whatever happens to it meanwhile."""

import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.cli import entry


def interrupted() -> int:
    raise KeyboardInterrupt


def test_ctrl_c_while_it_is_loaded_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stagewright.cli.main.main", interrupted)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert entry.run() == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_training_goes_on_when_its_reader_has_had_enough(tmp_path: Path) -> None:
    """As `head` has after a line; what is written to files must still be there."""
    text, metrics = tmp_path / "text", tmp_path / "metrics.jsonl"
    text.write_text("one line after another\n" * 300)
    shape = ["--layers", "1", "--hidden", "8", "--heads", "1", "--sequence", "16", "--batch-size", "2"]
    flags = ["--ranks", "1", "--microbatches", "1", "--steps", "30", *shape]
    command = [sys.executable, "-m", "stagewright.cli", "train", "--data", str(text), "--metrics", str(metrics), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline().startswith("1f1b: ")
        run.stdout.close()
        assert run.stderr is not None
        assert run.stderr.read() == ""
    assert run.returncode == 0
    assert len(metrics.read_text().splitlines()) == 31
