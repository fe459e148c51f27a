"""README's examples run as they are pasted, and its commands print what it says they do."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.cli.arguments import build_parser
from stagewright.schedules import Costs, create, simulate
from stagewright.schedules.drawing import grid_text

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
CONSOLE = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
SHELL = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
BIN = Path(sys.executable).parent


def environment() -> dict[str, str]:
    """That of someone who has activated the virtual environment, with a window of 100 columns."""
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}


def the_block(words: str) -> str:
    """The one block of Python in which these words occur."""
    (block,) = [block for block in PYTHON if words in block]
    return block


def run(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def paste(code: str, folder: Path, *flags: str) -> str:
    """Run a pasted example as a script of its own."""
    script = folder / "pasted.py"
    script.write_text(code, encoding="utf-8")
    return run([sys.executable, str(script), *flags])


def test_every_python_block_is_run_below() -> None:
    run_below = ("launch_local(train, num_ranks=4)", "add_arguments(parser)", "tied=", '("1f1b", "2bw")', "from_csv")
    blocks = [*map(the_block, run_below), the_block("forward_backward_func")]
    assert sorted(blocks) == sorted(PYTHON)


def test_the_embedding_example_trains(tmp_path: Path) -> None:
    losses = ast.literal_eval(paste(the_block("launch_local(train, num_ranks=4)"), tmp_path))
    assert losses[:3] == [None, None, None]
    assert losses[3] < 1.5  # the targets have a variance of 4


@pytest.mark.parametrize(("flags", "last"), [("", 1), ("--schedule zbv --ranks 4", 0)])
def test_the_trainer_that_steps_by_itself_takes_its_schedule_by_flag(flags: str, last: int, tmp_path: Path) -> None:
    losses = ast.literal_eval(paste(the_block("add_arguments(parser)"), tmp_path, *flags.split()))
    assert [rank for rank, loss in enumerate(losses) if loss is not None] == [last]
    assert losses[last] < 0.35  # from .45


def test_the_same_trainer_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(the_block("add_arguments(parser)"), encoding="utf-8")
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", str(script), "--ranks", "2", "--schedule", "zb-h1"]
    of_ranks = dict(re.findall(r"^([01]) (\S+)$", run(command), re.MULTILINE))
    alone = ast.literal_eval(paste(script.read_text(encoding="utf-8"), tmp_path))
    assert of_ranks["0"] == "None"
    assert float(of_ranks["1"]) == pytest.approx(alone[1], abs=1e-5)


def test_losses_ties_and_precision(tmp_path: Path) -> None:
    first, other = ast.literal_eval(paste(the_block("tied="), tmp_path))
    assert first == other, "every rank has them"
    loss, accuracy, norm = first
    assert loss < 0.2
    assert accuracy == 1
    assert norm > 0


def test_the_weights_of_the_asynchronous_example_are_those_printed(tmp_path: Path) -> None:
    printed = paste(the_block('("1f1b", "2bw")'), tmp_path)
    assert printed == "1f1b [0.9, 0.81, 0.729, 0.6561]\n2bw [0.9, 0.8, 0.71, 0.63]\n"
    assert printed in README


def test_the_megatron_example_learns(tmp_path: Path) -> None:
    losses = ast.literal_eval(paste(the_block("forward_backward_func"), tmp_path))
    assert losses[:3] == [None, None, None]
    assert losses[3] < 0.5  # from ln 32 = 3.5


def test_the_program_example_prints_the_figures_of_1f1b(tmp_path: Path) -> None:
    assert paste(the_block("from_csv"), tmp_path).splitlines()[-1] == "33.0 0.2727272727272727 (4, 3, 2, 1)"


def test_the_grid_is_that_of_1f1b() -> None:
    grid = grid_text(simulate(create("1f1b", num_ranks=4, num_microbatches=6).program(), Costs()))
    assert grid in README


@pytest.mark.parametrize(
    ("command", "output"),
    [
        pytest.param(command, output, id=command)
        for block in CONSOLE
        for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
        if not command.startswith("stagewright train")
    ],
)
def test_a_command_prints_what_is_shown_below_it(command: str, output: str) -> None:
    """Line by line and in this order; only lines that are empty, and what `…` stands for, may be left out."""
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=110, env=environment(), check=False
    )
    printed = iter([line.rstrip() for line in (done.stdout + done.stderr).splitlines()])
    for line in output.splitlines():
        assert line == "…" or line in printed, line


def test_the_table_of_a_run_has_the_rows_that_are_shown() -> None:
    (block,) = [block for block in CONSOLE if "stagewright train" in block]
    labels = [re.split(r"  +", line)[0] for line in block.splitlines()[1:]]
    source = (Path(__file__).parent.parent / "cli" / "report.py").read_text(encoding="utf-8")
    table = labels[: labels.index("")]
    assert table == [label for label in re.findall(r'add_row\(\s*"([^"]*)"', source) if label != "loss scale"]


@pytest.mark.parametrize(
    "line",
    [line for block in SHELL for line in block.splitlines() if "cli train" in line or line.startswith("stagewright")],
)
def test_the_flags_shown_exist(line: str) -> None:
    words = re.sub(r"#.*", "", line.replace("\\", "")).replace('"', "").split()
    flags = words[words.index("train") :]
    assert build_parser().parse_args(flags).command == "train"
