"""SIGTERM: with --save-on-sigterm a run ends in good order and goes on later, without it it ends at once."""

import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest
from launched import free_port
from runs import TINY, Run, has_made, losses_in, losses_of, write_text

from stagewright.cli.main import main

NUM_STEPS = 300


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text")


def command(text: Path, folder: Path, flags: str = "") -> str:
    return (
        f"train {TINY} --data {text} --steps {NUM_STEPS} --metrics {folder}/metrics.jsonl --save {folder}/run "
        f"--resume --quiet {flags}"
    )


@pytest.fixture(scope="module")
def unbroken(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    """The losses of runs that nothing ends, by schedule."""
    curves = {}
    for schedule in ("1f1b", "2bw"):
        folder = tmp_path_factory.mktemp(schedule)
        Run(f"stagewright {command(text, folder, f'--schedule {schedule}')}").finish()
        curves[schedule] = losses_in(folder / "metrics.jsonl")
        assert curves[schedule].keys() == set(range(1, NUM_STEPS + 1))
    return curves


def test_it_says_where_to_save(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *TINY.split(), "--data", str(text), "--save-on-sigterm"]) == 2
    message = "stagewright train: --save-on-sigterm says how to save: say where with --save DIR\n"
    assert capsys.readouterr().err == message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "schedule", "told"),
    [
        ("local", "1f1b", "launcher"),
        ("local", "2bw", "group"),
        ("torchrun", "1f1b", "one rank"),
        ("torchrun", "2bw", "all ranks"),
        ("environment", "1f1b", "one rank"),
    ],
)
def test_a_run_finishes_its_step_and_goes_on_later_with_the_same_losses(
    launcher: str,
    schedule: str,
    told: str,
    text: Path,
    tmp_path: Path,
    runs: list[Run],
    unbroken: dict[str, dict[int, float]],
) -> None:
    train = command(text, tmp_path, f"--schedule {schedule} --save-on-sigterm")
    metrics = tmp_path / "metrics.jsonl"
    if launcher == "local":
        runs.append(Run(f"stagewright {train}"))
    elif launcher == "torchrun":
        runs.append(Run(f"torchrun --standalone --nproc-per-node 2 -m stagewright.cli {train}"))
    else:
        place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        runs += [Run(f"python -m stagewright.cli {train}", RANK=rank, LOCAL_RANK=rank, **place) for rank in ("0", "1")]
    first = runs[0]
    first.wait_until(partial(has_made, metrics, 20))
    match told:
        case "launcher":
            os.kill(first.pid, signal.SIGTERM)
        case "group":
            os.killpg(first.pid, signal.SIGTERM)
        case "one rank":
            os.kill(first.ranks()[1] if launcher == "torchrun" else first.pid, signal.SIGTERM)
        case _:
            for pid in first.ranks().values():
                os.kill(pid, signal.SIGTERM)
    out = "".join(run.finish() for run in runs)
    assert all(run.has_left_nothing() for run in runs)
    num_made = len(losses_of(metrics))
    assert num_made < NUM_STEPS
    assert (tmp_path / "run" / "latest").read_text() == f"step-{num_made}.save-1\n"
    assert out == (
        f"ended by SIGTERM after step {num_made} of {NUM_STEPS}, and saved to {tmp_path}/run: the same command with "
        "--resume goes on from there\n"
    )
    assert "validation loss" in Run(f"stagewright {train}").finish()
    assert losses_in(metrics) == unbroken[schedule]
    assert len(losses_of(metrics)) == NUM_STEPS, "no step was made twice"
    assert Run(f"stagewright {train}").finish() == (
        f"{tmp_path}/run has {NUM_STEPS} of {NUM_STEPS} updates behind it: nothing is left to do; give more --steps to "
        "train it on\n"
    )


@pytest.mark.slow
def test_a_signal_that_comes_before_ranks_are_ready_waits_for_them(text: Path, tmp_path: Path, runs: list[Run]) -> None:
    """The first step is made and saved, so that a run that is always told early gets on as well."""
    run = Run(f"stagewright {command(text, tmp_path, '--save-on-sigterm')}")
    runs.append(run)
    run.wait_until(lambda: len(run.still_running()) >= 3)
    os.kill(run.pid, signal.SIGTERM)
    assert run.finish().startswith(f"ended by SIGTERM after step 1 of {NUM_STEPS}")
    assert run.err == ""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["stagewright", "torchrun --standalone --nproc-per-node 2 -m stagewright.cli"])
def test_without_the_flag_all_ranks_end_at_once(launcher: str, text: Path, tmp_path: Path, runs: list[Run]) -> None:
    run = Run(f"{launcher} {command(text, tmp_path)} --steps 100000")
    runs.append(run)
    run.wait_until(partial(has_made, tmp_path / "metrics.jsonl", 20))
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() != 0
    assert run.has_left_nothing()
    assert "stagewright" not in re.sub(r"-m stagewright\.cli|stagewright\.cli FAILED", "", run.err)
    assert list((tmp_path / "run").iterdir()) == []
