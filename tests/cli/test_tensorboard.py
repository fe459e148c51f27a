"""Curves for TensorBoard: what is written is what the run did; what cannot be written is refused at once."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from stagewright.cli.main import main
from stagewright.cli.settings import TrainSettings
from stagewright.cli.train_command import train_rank
from stagewright.engine import launch_local
from stagewright.schedules import create


def test_the_curves_are_those_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="torch writes curves with the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"the quick brown fox number {number} jumps over the lazy dog\n" * 3)
    settings = TrainSettings(
        create("1f1b", num_ranks=2, num_microbatches=2),
        data=text,
        layers=2,
        hidden=16,
        heads=2,
        sequence=16,
        batch_size=4,
        steps=5,
        clip=1.0,
        quiet=True,
        metrics=tmp_path / "run.jsonl",
        tensorboard=tmp_path / "curves",
    )
    launch_local(partial(train_rank, settings), 2, backend="threads")
    *steps, last = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())

    (file,) = (tmp_path / "curves").iterdir()  # of one rank
    events = EventAccumulator(str(file)).Reload()
    curves = {name: [(point.step, point.value) for point in events.Scalars(name)] for name in events.Tags()["scalars"]}
    names = {"loss": "loss", "tokens per second": "tokens_per_second", "gradient norm": "grad_norm"}
    expected = {name: [(line["step"], line[key]) for line in steps] for name, key in names.items()}
    expected |= {"validation loss": [(5, last["val_loss"])], "bubble fraction": [(5, last["bubble"]["measured"])]}
    assert curves.keys() == expected.keys()
    for name, points in expected.items():
        assert curves[name] == [(step, pytest.approx(value, rel=1e-5)) for step, value in points], name


def test_the_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert main(["train", "--tensorboard", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stagewright train: --tensorboard needs the package tensorboard")
    assert line.endswith("pip install 'stagewright[tensorboard]'")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard", reason="torch writes curves with the package tensorboard")
    (tmp_path / "file").touch()
    assert main(["train", "--tensorboard", str(tmp_path / "file" / "curves")]) == 2
    assert f"cannot write curves to {tmp_path}/file/curves: Not a directory" in capsys.readouterr().err
