"""CONTRIBUTING's worked example is a schedule that works wherever a name does."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from stagewright.cli.settings import TrainSettings
from stagewright.cli.train_command import train_rank
from stagewright.engine import launch_local
from stagewright.schedules import create

ROOT = Path(__file__).parent.parent
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING, re.DOTALL)
(COMMANDS,) = re.findall(r"```sh\n(.*?)```", CONTRIBUTING, re.DOTALL)
SHOW, COMPARE, VERIFY, TRAIN = COMMANDS.splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where someone has saved the example."""
    (tmp_path / "my_schedules.py").write_text(EXAMPLE, encoding="utf-8")
    return tmp_path


def run(command: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=110,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_docstring_is_its_grid(folder: Path) -> None:
    grid = re.findall(r"rank \d  .*", EXAMPLE)
    assert len(grid) == 4
    assert "\n".join(grid) in run(SHOW, folder)


def test_its_formula_is_what_the_simulation_finds(folder: Path) -> None:
    (row,) = [line for line in run(COMPARE, folder).splitlines() if line.startswith(" in-groups")]
    assert re.search(r"\(M/G\)\(P-1\)\(F\+B\) +makespan +60\.0% = +60\.0%", row)  # 4 * 3 * 3 of that and 8 * 3


def test_its_program_is_legal(folder: Path) -> None:
    assert run(VERIFY, folder).startswith("standard input is legal under rendezvous sends: 4 ranks")


def test_the_shapes_that_it_refuses_are_refused_in_its_words(folder: Path) -> None:
    with pytest.raises(AssertionError, match="got 5 microbatches in groups of 2; use 4"):
        run(SHOW.replace("--microbatches 4", "--microbatches 5"), folder)


@pytest.mark.slow
def test_it_trains_as_every_schedule_does(folder: Path) -> None:
    text = folder / "text"
    text.write_text("".join(f"line {number} of a text to learn\n" for number in range(100)))
    shape = {"layers": 2, "hidden": 8, "heads": 2, "sequence": 8, "batch_size": 8, "steps": 3, "data": text}
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in shape.items())
    table = run(f"{TRAIN} {flags} --quiet", folder)
    assert re.search(r"^schedule +in-groups +2 ranks, 8 microbatches", table)

    settings = TrainSettings(create("1f1b", num_ranks=1, num_microbatches=8), quiet=True, **shape)
    (alone,) = launch_local(partial(train_rank, settings), 1, backend="threads")
    for row, loss in (("training loss, last step", alone.last_loss), ("validation loss", alone.validation_bits)):
        (printed,) = re.findall(rf"^{row} +(\d+\.\d{{4}})", table, re.MULTILINE)
        assert float(printed) == pytest.approx(loss, abs=1e-4)


def test_the_tests_that_hold_the_promises_exist() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", CONTRIBUTING)
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []
