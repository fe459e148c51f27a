"""Training through the command: the same losses for every cut, what is printed and written, how it ends."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MODEL = ["--layers", "4", "--hidden", "16", "--heads", "2"]
TINY = [*MODEL, "--sequence", "16", "--batch-size", "8", "--microbatches", "4"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"the quick brown fox number {number} jumps over the lazy dog\n" * 20)
    return folder


def command(*flags: str | Path) -> list[str]:
    return [sys.executable, "-m", "stagewright.cli", "train", *map(str, flags)]


def stagewright_train(*flags: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*flags), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)


def losses(path: Path) -> list[float]:
    return [line["loss"] for line in map(json.loads, path.read_text().splitlines()) if "loss" in line]


@pytest.mark.parametrize("dropout", ["0", "0.2"])
def test_the_same_seed_gives_the_same_losses_for_every_schedule_and_number_of_ranks(
    text: Path, tmp_path: Path, dropout: str
) -> None:
    curves = {}
    for schedule, ranks in (("1f1b", "1"), ("1f1b", "2"), ("gpipe", "4")):
        file = tmp_path / f"{schedule}{ranks}.jsonl"
        flags = ["--schedule", schedule, "--ranks", ranks, "--steps", "12", "--dropout", dropout, "--seed", "1"]
        done = stagewright_train("--data", text, "--metrics", file, "--quiet", *TINY, *flags)
        assert done.returncode == 0, done.stderr
        curves[schedule, ranks] = losses(file)
    alone = curves.pop(("1f1b", "1"))
    assert len(alone) == 12
    assert alone[-1] < alone[0]
    for curve in curves.values():
        assert curve == pytest.approx(alone, abs=5e-5)


def test_the_table_and_the_metrics_say_what_happened(text: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    done = stagewright_train("--data", text, "--metrics", file, "--steps", "15", *TINY)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout

    *steps, last = map(json.loads, file.read_text().splitlines())
    assert [line["step"] for line in steps] == list(range(1, 16))
    for line in steps:
        assert set(line) == {"step", "loss", "tokens_per_second", "step_seconds"}
        assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(8 * 16)
    assert last["bubble"]["formula"] == pytest.approx(0.2, abs=0.05)  # (P-1) / (M+P-1), if the stages were equal
    assert 0 < last["bubble"]["simulated"] < 1
    assert 0 < last["bubble"]["measured"] < 1
    assert last["val_bits_per_byte"] == pytest.approx(last["val_loss"] / math.log(2))

    table = dict(re.findall(r"^ ?(\w[\w ,]*?) {2,}(\S+)", done.stdout, re.MULTILINE))
    assert table["training loss, first step"] == f"{steps[0]['loss']:.4f}"
    assert table["training loss, last step"] == f"{steps[-1]['loss']:.4f}"
    assert table["validation loss"] == f"{last['val_bits_per_byte']:.4f}"
    assert table["unigram byte model"] == f"{last['unigram_bits_per_byte']:.4f}"
    assert table["bubble, measured"] == f"{last['bubble']['measured']:.4f}"
    for line in steps:  # a short run into a pipe prints every step
        assert f"step {line['step']:>2}/15  loss {line['loss']:.4f}" in done.stdout


def test_quiet_prints_the_table_alone(text: Path) -> None:
    done = stagewright_train("--data", text, "--steps", "2", "--ranks", "1", "--quiet", *TINY)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()][:2] == ["schedule", "training"]


def test_torchrun_starts_the_same_training(text: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    file = tmp_path / "torchrun.jsonl"
    flags = ["--data", text, "--steps", "5", "--metrics", file, *TINY]
    done = subprocess.run([*torchrun, *command(*flags)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("validation loss") == 1
    here = tmp_path / "here.jsonl"
    assert stagewright_train("--data", text, "--steps", "5", "--metrics", here, *TINY).returncode == 0
    assert losses(file) == losses(here)


def test_interrupting_ends_every_process_without_a_traceback(text: Path) -> None:
    running = subprocess.Popen(
        command("--data", text, "--steps", "1000000", *TINY),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert running.stdout is not None
    assert any("step" in line and "loss" in line for line in iter(running.stdout.readline, ""))
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
