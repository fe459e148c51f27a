"""Training through the command: the same losses for every cut, what is printed and written, how it ends."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from stagewright.cli.settings import TrainSettings
from stagewright.cli.train_command import train_rank
from stagewright.cli.trainer import first_measured_step, learning_rate
from stagewright.engine import launch_local
from stagewright.schedules import create

SHAPE = {"layers": 4, "hidden": 16, "heads": 2, "sequence": 16, "batch_size": 8, "steps": 12, "seed": 1}
SHAPE_FLAGS = [part for name, value in SHAPE.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"the quick brown fox number {number} jumps over the lazy dog\n" * 20)
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def in_threads(name: str, num_ranks: int, text: Path, dropout: float = 0.0) -> list[float]:
    """Train in this process, and return the losses that were written."""
    file = text.parent / f"{name}-{num_ranks}-{dropout}.jsonl"
    schedule = create(name, num_ranks=num_ranks, num_microbatches=4)
    settings = TrainSettings(schedule, data=text, dropout=dropout, metrics=file, quiet=True, **SHAPE)  # type: ignore[arg-type]
    launch_local(partial(train_rank, settings), num_ranks, backend="threads")
    return losses(file)


def losses(path: Path) -> list[float]:
    return [line["loss"] for line in map(json.loads, path.read_text().splitlines()) if "loss" in line]


def command(*flags: str | Path) -> list[str]:
    return [sys.executable, "-m", "stagewright.cli", "train", "--microbatches", "4", *SHAPE_FLAGS, *map(str, flags)]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=240)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_same_seed_gives_the_same_losses_for_every_schedule_and_number_of_ranks(text: Path, dropout: float) -> None:
    alone = in_threads("1f1b", 1, text, dropout)
    assert len(alone) == 12
    assert alone[-1] < alone[0]
    for name, num_ranks in (("1f1b", 2), ("gpipe", 2), ("1f1b", 4), ("gpipe", 4)):
        assert in_threads(name, num_ranks, text, dropout) == pytest.approx(alone, abs=5e-5), (name, num_ranks)


@pytest.mark.usefixtures("one_thread")
def test_the_seed_and_the_dropout_matter(text: Path) -> None:
    assert in_threads("1f1b", 1, text, dropout=0.2)[1:] != pytest.approx(in_threads("1f1b", 1, text)[1:], abs=1e-4)


@pytest.mark.usefixtures("one_thread")
def test_the_table_and_the_metrics_say_what_happened(text: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    done = run(command("--data", text, "--metrics", file))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert losses(file) == pytest.approx(in_threads("1f1b", 1, text), abs=5e-5)  # two processes, as one alone

    *steps, last = map(json.loads, file.read_text().splitlines())
    assert [line["step"] for line in steps] == list(range(1, 13))
    for line in steps:
        assert set(line) == {"step", "loss", "tokens_per_second", "step_seconds"}
        assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(8 * 16)
        assert f"step {line['step']:>2}/12  loss {line['loss']:.4f}" in done.stdout  # every step of a run so short
    assert last["bubble"]["formula"] == pytest.approx(1 / 5)  # (P-1) / (M+P-1)
    assert 0 < last["bubble"]["simulated"] < 1
    assert 0 < last["bubble"]["measured"] < 1
    assert last["val_bits_per_byte"] == pytest.approx(last["val_loss"] / math.log(2))

    table = dict(re.findall(r"^ ?(\w[\w ,]*?) {2,}(\S+)", done.stdout, re.MULTILINE))
    assert table["schedule"] == "1f1b"
    assert table["training loss, first step"] == f"{steps[0]['loss']:.4f}"
    assert table["training loss, last step"] == f"{steps[-1]['loss']:.4f}"
    assert table["validation loss"] == f"{last['val_bits_per_byte']:.4f}"
    assert table["unigram byte model"] == f"{last['unigram_bits_per_byte']:.4f}"
    for kind in ("formula", "simulated", "measured"):
        assert table[f"bubble, {kind}"] == f"{last['bubble'][kind]:.4f}"


@pytest.mark.usefixtures("one_thread")
def test_torchrun_starts_the_same_training(text: Path, tmp_path: Path) -> None:
    file = tmp_path / "torchrun.jsonl"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = run([*torchrun, *command("--data", text, "--metrics", file, "--quiet", "--schedule", "gpipe")])
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()][:2] == ["schedule", "training"]  # the table alone
    assert done.stdout.count("schedule") == 1  # of one rank
    assert losses(file) == pytest.approx(in_threads("gpipe", 1, text), abs=5e-5)


def test_a_schedule_that_the_engine_cannot_run_is_wrong_input(text: Path) -> None:
    done = run(command("--data", text, "--schedule", "seq1f1b", "--ranks", "1", "--quiet"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("stagewright train: the engine cannot run seq1f1b: ")
    assert done.stderr.count("\n") == 1


def test_interrupting_ends_every_process_without_a_traceback(text: Path) -> None:
    running = subprocess.Popen(
        command("--data", text, "--steps", "1000000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert running.stdout is not None
    assert any(line.startswith("step") for line in iter(running.stdout.readline, ""))
    os.killpg(running.pid, signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert err == "interrupted\n"
    assert group_ends(running.pid)


def group_ends(group: int) -> bool:
    """Wait for the last process of a group; multiprocessing's own resource tracker goes a moment after its parent."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_the_learning_rate_rises_then_falls_to_a_tenth() -> None:
    settings = TrainSettings(create("1f1b", num_ranks=2, num_microbatches=4), steps=100, lr=2.0)
    rates = [learning_rate(step, settings) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(1.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize(("num_steps", "first"), [(1, 0), (2, 1), (5, 1), (11, 1), (12, 2), (400, 390)])
def test_the_bubble_is_measured_on_the_last_steps_and_not_on_the_first(num_steps: int, first: int) -> None:
    assert first_measured_step(num_steps) == first
