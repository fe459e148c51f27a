"""Resuming through the command: the curve goes on exactly, also on other ranks and under another schedule."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stagewright.cli.corpus import Corpus, load_corpus
from stagewright.cli.main import main
from stagewright.cli.metrics import Silence, StepMetrics
from stagewright.cli.settings import TrainSettings
from stagewright.cli.trainer import train
from stagewright.engine import RankContext, launch_local
from stagewright.schedules import create

TINY: dict[str, Any] = {
    "layers": 4,
    "hidden": 8,
    "heads": 2,
    "sequence": 8,
    "batch_size": 8,
    "steps": 20,
    "save_every": 10,
    "lr": 3e-3,
    "dropout": 0.1,
    "tie": True,
    "clip": 0.5,
    "dtype": "float64",
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"the quick brown fox number {number} jumps over the lazy dog\n" * 3)
    return folder


class Heard(Silence):
    """Keeps the losses by step, and fails after one of them if it is told to."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def step_done(self, metrics: StepMetrics) -> None:
        """Keep this one."""
        self.losses[metrics.step] = metrics.loss


def hear(settings: TrainSettings, corpus: Corpus, context: RankContext) -> dict[int, float]:
    """The losses that one rank hears of, by step."""
    heard = Heard()
    train(context, settings, corpus, heard)
    return heard.losses


def losses_of(name: str, num_ranks: int, text: Path, **changes: Any) -> dict[int, float]:
    """Train in this process."""
    options = changes.pop("options", {})
    schedule = create(name, num_ranks=num_ranks, num_microbatches=4 // changes.get("dp", 1), **options)
    settings = TrainSettings(schedule, data=text, **{**TINY, **changes})
    ranks = launch_local(partial(hear, settings, load_corpus(text)), settings.num_ranks, backend="threads")
    heard: dict[int, float] = ranks[settings.reporter]
    return heard


@pytest.fixture(scope="module")
def curves() -> dict[str, dict[int, float]]:
    """Those of unbroken runs, once they are known."""
    return {}


def unbroken(name: str, text: Path, folder: Path, **changes: Any) -> dict[int, float]:
    losses = losses_of(name, 2, text, save=folder, **changes)
    assert sorted(losses) == list(range(1, 21))
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-10.save-1", "step-20.save-2"]
    assert (folder / "latest").read_text() == "step-20.save-2\n"
    return losses


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("1f1b", {}),
        ("2bw", {"save_async": True}),
        ("pipedream", {"clip": None, "tie": False}),
        ("1f1b", {"optimizer": "muon", "dtype": "float16", "accumulate": 2}),
    ],
)
def test_the_same_ranks_go_on_with_the_same_losses(
    name: str, changes: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    """To the last bit, though the learning rate follows a plan for all steps, and text comes in another order."""
    losses = unbroken(name, text, tmp_path / "run", **changes)
    resumed = losses_of(name, 2, text, resume=tmp_path / "run" / "step-10.save-1", **changes)
    assert resumed == {step: loss for step, loss in losses.items() if step > 10}


def test_other_ranks_and_schedules_go_on_with_the_same_losses(text: Path, tmp_path: Path) -> None:
    """P=2 -> 1, 1f1b -> zbv, two replicas, and another cut."""
    losses = unbroken("1f1b", text, tmp_path / "run")
    rest = {step: loss for step, loss in losses.items() if step > 10}
    resume = tmp_path / "run" / "step-10.save-1"
    others: list[tuple[str, int, dict[str, Any]]] = [
        ("1f1b", 1, {}),
        ("zbv", 2, {}),
        ("interleaved", 2, {"options": {"num_chunks": 2}}),
        ("1f1b", 2, {"dp": 2}),
        ("gpipe", 3, {"cut": "counts=1,1,2"}),
    ]
    for name, num_ranks, changes in others:
        assert losses_of(name, num_ranks, text, resume=resume, **changes) == pytest.approx(rest, rel=1e-10), name


def test_a_run_without_anything_to_resume_begins_and_keeps_the_last_checkpoints(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    losses = losses_of("gpipe", 2, text, save=folder, resume=True, save_every=4, keep=2)
    assert sorted(losses) == list(range(1, 21))
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-16.save-4", "step-20.save-5"]
    longer = losses_of("gpipe", 2, text, save=folder, resume=True, save_every=None, steps=22, keep=2)
    assert sorted(longer) == [21, 22]
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-20.save-5", "step-22.save-6"]


FLAGS = [
    "--layers",
    "2",
    "--hidden",
    "8",
    "--heads",
    "2",
    "--sequence",
    "8",
    "--batch-size",
    "4",
    "--microbatches",
    "2",
]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--save-every", "2"], "--save-every says how to save: say where with --save DIR"),
        (["--keep", "2"], "--keep says how to save: say where with --save DIR"),
        (["--save-async"], "--save-async says how to save: say where with --save DIR"),
        (["--resume"], "--resume goes on from the folder of --save: give --save DIR, or --resume DIR"),
        (["--save", "{folder}/text/0.txt"], "cannot save to {folder}/text/0.txt: File exists"),
        (["--resume", "{folder}/none"], "there is no checkpoint in {folder}/none to resume from"),
        (
            ["--resume", "{run}", "--steps", "2"],
            "has 2 of 2 updates behind it: nothing is left to do; give more --steps",
        ),
        (["--resume", "{run}", "--seed", "5"], "the checkpoint was trained with --seed 0: got --seed 5"),
        (["--resume", "{run}", "--layers", "3"], "the checkpoint was trained with --layers 2: got --layers 3"),
        (["--resume", "{run}", "--data", "{folder}/other"], "was trained on another text: give the same --data"),
        (
            ["--resume", "{folder}/damaged"],
            "{folder}/damaged/latest cannot be read: it names no checkpoint: got '/etc'",
        ),
    ],
)
def test_what_cannot_be_saved_or_resumed_is_said_in_one_line(
    flags: list[str], message: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, damaged, other = tmp_path / "run", tmp_path / "damaged", tmp_path / "other"
    small = {"layers": 2, "batch_size": 4, "steps": 2, "dtype": "float32", "tie": False, "save_every": None}
    losses_of("gpipe", 1, text, save=run, **small)
    damaged.mkdir()
    (damaged / "latest").write_text("/etc")
    other.mkdir()
    (other / "a.txt").write_text("nothing like the brown fox\n" * 50)
    (other / "b.txt").write_text("nor like the lazy dog\n" * 50)
    places = {"folder": tmp_path, "run": run}
    given = [flag.format(**places) for flag in flags]
    assert main(["train", *FLAGS, "--data", str(text), "--steps", "4", *given]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("stagewright train: ")
    assert message.format(**places) in line


@pytest.mark.parametrize("resume", [["--resume"], ["--resume", "auto"]])
def test_a_run_that_is_through_is_no_failure_for_what_starts_it_again(
    resume: list[str], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    small = {"layers": 2, "batch_size": 4, "steps": 2, "dtype": "float32", "tie": False, "save_every": None}
    losses_of("gpipe", 1, text, save=run, **small)
    assert main(["train", *FLAGS, "--data", str(text), "--steps", "2", "--save", str(run), *resume]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (
        f"{run} has 2 of 2 updates behind it: nothing is left to do; give more --steps to train it on\n",
        "",
    )


def command(text: Path, folder: Path, *flags: str) -> list[str]:
    train = [
        "train",
        *FLAGS,
        "--data",
        str(text),
        "--steps",
        "40",
        "--save",
        str(folder),
        "--save-every",
        "1",
        "--resume",
    ]
    return [sys.executable, "-m", "stagewright.cli", *train, *flags]


def losses_in(path: Path) -> dict[int, float]:
    pairs = re.findall(r'"step": (\d+), "loss": ([^,]+),', path.read_text())
    return {int(step): float(loss) for step, loss in pairs}


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_with_the_same_command(text: Path, tmp_path: Path) -> None:
    """kill -9 of the launcher and its ranks in the midst of saving; processes, until it comes to its end."""
    metrics = tmp_path / "metrics.jsonl"
    subprocess.run([*command(text, tmp_path / "whole"), "--metrics", str(tmp_path / "whole.jsonl")], check=True)
    flags = ["--metrics", str(metrics), "--keep", "2", "--save-async"]
    for attempt in range(8):
        process = subprocess.Popen(command(text, tmp_path / "run", *flags), start_new_session=True)
        before = len(losses_in(metrics)) if metrics.exists() else 0
        while attempt < 3 and process.poll() is None:
            if metrics.exists() and len(losses_in(metrics)) > before + 3:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.002)
        if process.wait() == 0:
            break
    assert attempt == 3
    assert losses_in(metrics) == losses_in(tmp_path / "whole.jsonl")
    assert losses_in(metrics).keys() == set(range(1, 41))
