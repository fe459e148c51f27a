"""Training through the command: the same losses for every cut, what is printed and written, how it ends."""

import json
import math
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
from stagewright.cli.metrics import Silence, StepMetrics
from stagewright.cli.settings import TrainSettings
from stagewright.cli.trainer import learning_rate, train
from stagewright.engine import RankContext, launch_local
from stagewright.schedules import create, find, names

SHAPE: dict[str, Any] = {"layers": 4, "hidden": 16, "heads": 2, "sequence": 16, "batch_size": 8, "steps": 12, "seed": 1}
SHAPE_FLAGS = [part for name, value in SHAPE.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"the quick brown fox number {number} jumps over the lazy dog\n" * 3)
    return folder


def in_threads(name: str, num_ranks: int, text: Path, **changes: Any) -> list[float]:
    """Train in this process, and return the losses of all updates."""
    schedule = create(name, num_ranks=num_ranks, num_microbatches=4)
    settings = TrainSettings(schedule, data=text, **{**SHAPE, **changes})
    results = launch_local(partial(losses_of_rank, settings, load_corpus(text)), settings.num_ranks, backend="threads")
    assert [bool(of_rank) for of_rank in results].count(True) == settings.dp * len(schedule.placement.routes)
    return results[settings.reporter]


def losses_of_rank(settings: TrainSettings, corpus: Corpus, context: RankContext) -> list[float]:
    """The losses that one rank hears of."""
    heard = Heard()
    train(context, settings, corpus, heard)
    return heard.losses


class Heard(Silence):
    """Keeps the losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def step_done(self, metrics: StepMetrics) -> None:
        """Keep this one."""
        self.losses.append(metrics.loss)


def losses(path: Path) -> list[float]:
    return [line["loss"] for line in map(json.loads, path.read_text().splitlines()) if "loss" in line]


def command(*flags: str | Path) -> list[str]:
    return [sys.executable, "-m", "stagewright.cli", "train", "--microbatches", "4", *SHAPE_FLAGS, *map(str, flags)]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=240)


# One of each kind in the normal suite, all of them in the slow one.
PROMPT = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe", "dualpipev")
SYNCHRONOUS = [name for name in names() if find(name).synchronous and find(name).runnable]
TINY = {"hidden": 8, "sequence": 8, "steps": 20, "lr": 3e-3}
EVERYTHING = {"dropout": 0.1, "tie": True, "clip": 0.5, "accumulate": 2, "optimizer": "muon"}


@pytest.fixture(scope="module")
def curves() -> dict[str, list[float]]:
    """The losses of one process, once they are known."""
    return {}


@pytest.mark.parametrize(
    "name", [name if name in PROMPT else pytest.param(name, marks=pytest.mark.slow) for name in SYNCHRONOUS]
)
@pytest.mark.parametrize(("settings", "recompute"), [({}, "off"), (EVERYTHING, 1)], ids=["plain", "with everything on"])
def test_every_synchronous_schedule_has_the_curve_of_one_process(
    name: str, settings: dict[str, Any], recompute: str | int, text: Path, curves: dict[str, list[float]]
) -> None:
    """fp32, 20 updates, 4 digits: with one stage a rank and with several, one copy of them and two."""
    alone = curves.get(str(settings)) or in_threads("1f1b", 1, text, **TINY, **settings)
    curves[str(settings)] = alone
    assert alone[-1] < alone[0] - 0.3
    assert in_threads(name, 2, text, **TINY, **settings, recompute=recompute) == pytest.approx(alone, abs=5e-5)


def test_the_same_seed_gives_the_same_losses_for_every_number_of_ranks_and_chunks(text: Path) -> None:
    alone = in_threads("1f1b", 1, text, dropout=0.2)
    assert len(alone) == 12
    for name, num_ranks in (("1f1b", 3), ("gpipe", 4), ("interleaved", 2), ("zb-h1", 4)):
        recomputed = in_threads(name, num_ranks, text, dropout=0.2, recompute="full")
        assert recomputed == pytest.approx(alone, abs=5e-5), (name, num_ranks)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "2bw"])
def test_replicas_on_their_share_of_each_batch_have_the_losses_of_one_pipeline(name: str, text: Path) -> None:
    """The batch is the same, so are the losses, to four digits; accumulation, ties and clipping make no difference."""
    options: dict[str, Any] = {"tie": True, "clip": 0.5}
    if name != "2bw":
        options["accumulate"] = 2
    alone = in_threads(name, 2, text, **TINY, **options)
    assert in_threads(name, 2, text, **TINY, **options, dp=2) == pytest.approx(alone, abs=5e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_every_precision_has_one_curve_near_that_of_float32(dtype: str, text: Path) -> None:
    single = in_threads("1f1b", 1, text, **TINY)
    curve = in_threads("1f1b", 1, text, **TINY, dtype=dtype)
    assert curve != single
    assert curve == pytest.approx(single, abs=2e-2 if dtype == "bfloat16" else 5e-3)
    for name in ("1f1b", "zbv", "dualpipe"):
        assert in_threads(name, 2, text, **TINY, dtype=dtype) == pytest.approx(curve, abs=5e-5), name


def test_a_batch_split_in_two_accumulated_ones_makes_the_same_update(text: Path) -> None:
    whole = in_threads("1f1b", 2, text, batch_size=16)
    assert in_threads("1f1b", 2, text, batch_size=8, accumulate=2) == pytest.approx(whole, abs=5e-5)


@pytest.mark.parametrize(
    "changed",
    [{"dropout": 0.2}, {"tie": True}, {"clip": 0.1}, {"accumulate": 2}, {"optimizer": "muon"}, {"optimizer": "sgd"}],
    ids=str,
)
def test_every_setting_matters(changed: dict[str, Any], text: Path) -> None:
    assert in_threads("1f1b", 1, text, **changed)[1:] != pytest.approx(in_threads("1f1b", 1, text)[1:], abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"tie": True, "clip": 0.5, "recompute": 1, "optimizer": "muon"}], ids=str)
def test_2bw_has_a_curve_of_its_own_the_same_for_every_number_of_ranks(settings: dict[str, Any], text: Path) -> None:
    alone, synchronous = (in_threads(name, 1, text, **TINY, **settings, dropout=0.1) for name in ("2bw", "1f1b"))
    assert alone[0] == synchronous[0]
    assert alone[1:] != pytest.approx(synchronous[1:], abs=1e-3)
    assert alone[-1] < alone[0] - 0.3
    for num_ranks in (2, 4):
        curve = in_threads("2bw", num_ranks, text, **TINY, **settings, dropout=0.1)
        assert curve == pytest.approx(alone, abs=5e-5), num_ranks


def test_pipedream_updates_after_every_microbatch_and_learns_faster(text: Path) -> None:
    asynchronous, synchronous = (in_threads(name, 2, text, **TINY) for name in ("pipedream", "1f1b"))
    assert asynchronous[-1] < synchronous[-1]


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
    assert last["version"] == 12
    assert last["bubble"]["formula"] == pytest.approx(1 / 5)  # (P-1) / (M+P-1)
    assert 0 < last["bubble"]["simulated"] < 1
    assert 0 < last["bubble"]["measured"] < 1
    assert last["val_bits_per_byte"] == pytest.approx(last["val_loss"] / math.log(2))

    table = dict(re.findall(r"^ ?(\w[\w ,]*?) {2,}(\S+)", done.stdout, re.MULTILINE))
    assert table["schedule"] == "1f1b"
    assert table["training loss, first step"] == f"{steps[0]['loss']:.4f}"
    assert table["training loss, last step"] == f"{steps[-1]['loss']:.4f}"
    assert table["validation loss"] == f"{last['val_bits_per_byte']:.4f}"
    assert table["weights validated"] == "version"  # 12, the newest
    assert table["unigram byte model"] == f"{last['unigram_bits_per_byte']:.4f}"
    for kind in ("formula", "simulated", "measured"):
        assert table[f"bubble, {kind}"] == f"{last['bubble'][kind]:.4f}"


def test_torchrun_starts_the_same_training(text: Path, tmp_path: Path) -> None:
    file = tmp_path / "torchrun.jsonl"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = run([*torchrun, *command("--data", text, "--metrics", file, "--quiet", "--schedule", "gpipe")])
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()][:2] == ["schedule", "cut"]  # the table alone
    assert done.stdout.count("schedule") == 1  # of one rank
    assert losses(file) == pytest.approx(in_threads("gpipe", 1, text), abs=5e-5)


@pytest.mark.slow
def test_replicas_start_as_processes_of_their_own_or_of_torchrun(text: Path, tmp_path: Path) -> None:
    """One rank reports for all of them, and the losses are those of one replica."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    alone = in_threads("1f1b", 1, text)
    for launcher, ranks, words in (([], "2", "2 ranks, 4 microbatches, 2 replicas"), (torchrun, "1", "1 rank, 4")):
        file = tmp_path / f"{ranks}.jsonl"
        done = run([*launcher, *command("--data", text, "--metrics", file, "--quiet", "--ranks", ranks, "--dp", "2")])
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("schedule") == 1
        assert words in done.stdout
        assert losses(file) == pytest.approx(alone, abs=5e-5)


def test_an_asynchronous_schedule_is_as_easy(text: Path, tmp_path: Path) -> None:
    file = tmp_path / "2bw.jsonl"
    done = run(command("--data", text, "--metrics", file, "--schedule", "2bw", "--clip", "0.5", "--dtype", "float16"))
    assert done.returncode == 0, done.stderr
    assert losses(file) == pytest.approx(in_threads("2bw", 1, text, clip=0.5, dtype="float16"), abs=5e-5)
    *steps, last = map(json.loads, file.read_text().splitlines())
    assert all(line["grad_norm"] > 0 for line in steps[2:])  # the update of a batch comes with the one after the next
    assert (last["version"], last["bubble"]["formula"]) == (12, 0)
    assert 0 <= last["bubble"]["measured"] < 1
    assert re.search(r"^weights validated +version 12 +gradients up to 1 update old *$", done.stdout, re.M)
    assert re.search(r"^loss scale +65536 +at the end; an overflow halves it *$", done.stdout, re.M)
    assert re.search(r"^bubble fraction +idle / steady period, busiest rank *$", done.stdout, re.M)


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
