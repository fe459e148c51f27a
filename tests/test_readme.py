"""README's examples run as they are pasted, and its commands print what it says they do."""

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from stagewright import engine
from stagewright.cli.arguments import build_parser
from stagewright.schedules import Costs, create, find, simulate
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


def paste(code: str, folder: Path) -> str:
    """Run a pasted example as a script of its own."""
    script = folder / "pasted.py"
    script.write_text(code, encoding="utf-8")
    return run([sys.executable, str(script)])


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a pasted example here, its ranks as threads: starting processes takes longer than most examples."""
    monkeypatch.setattr(engine, "launch_local", partial(engine.launch_local, backend="threads"))

    def paste(code: str, *flags: str) -> str:
        monkeypatch.setattr(sys, "argv", ["pasted.py", *flags])
        exec(code, {"__name__": "__main__"})
        return capsys.readouterr().out

    return paste


def test_every_python_block_is_run_by_some_test() -> None:
    run_below = (
        "x.flip(1)",
        "launch_local(train, num_ranks=4)",
        "add_arguments(parser)",
        "tied=",
        '("1f1b", "2bw")',
        "from_csv",
        "cut_by_layout(",
        "make_mesh(",
        "Checkpoints(folder",
    )
    run_with_the_adapter = "forward_backward_func"
    assert sorted(map(the_block, (*run_below, run_with_the_adapter))) == sorted(PYTHON)


def test_replicas_print_the_loss_of_one_pipeline(in_threads: Callable[..., str]) -> None:
    alone, together = map(ast.literal_eval, in_threads(the_block("make_mesh(")).splitlines())
    assert alone == [None, alone[1]]
    assert together == [None, None, alone[1], alone[1]]
    assert 0 < alone[1] < 0.9


def test_a_training_is_resumed_on_other_ranks_with_the_same_loss(in_threads: Callable[..., str]) -> None:
    whole, resumed = map(ast.literal_eval, in_threads(the_block("Checkpoints(folder")).splitlines())
    assert whole == (0, resumed[1])
    assert resumed == (10, whole[1])


def test_the_ten_lines_train(in_threads: Callable[..., str]) -> None:
    loss = re.fullmatch(r"\[None, tensor\((.*)\)\]\n", in_threads(the_block("x.flip(1)")))
    assert loss is not None
    assert float(loss[1]) < 0.1  # the targets have a variance of 1


def test_the_embedding_example_trains(tmp_path: Path) -> None:
    losses = ast.literal_eval(paste(the_block("launch_local(train, num_ranks=4)"), tmp_path))
    assert losses[:3] == [None, None, None]
    assert losses[3] < 1.5  # the targets have a variance of 4


@pytest.mark.parametrize(
    ("flags", "reporter"), [("", 1), ("--schedule zbv --ranks 4", 0), ("--schedule interleaved --chunks 3", 1)]
)
def test_the_trainer_that_steps_by_itself_takes_its_schedule_by_flag(
    flags: str, reporter: int, in_threads: Callable[..., str]
) -> None:
    losses = ast.literal_eval(in_threads(the_block("add_arguments(parser)"), *flags.split()))
    assert [rank for rank, loss in enumerate(losses) if loss is not None] == [reporter]
    assert losses[reporter] < 0.4  # from .5 or more


@pytest.mark.slow
def test_the_same_trainer_runs_plainly_and_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(the_block("add_arguments(parser)"), encoding="utf-8")
    plainly = ast.literal_eval(run([sys.executable, str(script)]))
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2"]
    of_ranks = dict(re.findall(r"^([01]) (\S+)$", run([*torchrun, str(script), "--schedule", "zb-h1"]), re.MULTILINE))
    assert of_ranks["0"] == str(plainly[0]) == "None"
    assert float(of_ranks["1"]) == pytest.approx(plainly[1], abs=1e-5)


def test_losses_ties_and_precision(in_threads: Callable[..., str]) -> None:
    first, other = ast.literal_eval(in_threads(the_block("tied=")))
    assert first == other, "every rank has them"
    loss, accuracy, norm = first
    assert loss < 0.2
    assert accuracy == 1
    assert norm > 0


def test_a_model_is_cut_and_trains(in_threads: Callable[..., str]) -> None:
    layout, losses = in_threads(the_block("cut_by_layout(")).splitlines()
    assert layout == "Et|tt|tt|tL"
    *others, loss = ast.literal_eval(losses)
    assert others == [None] * 3
    assert loss < 0.5  # from 3.5


def test_the_weights_of_the_asynchronous_example_are_those_printed(in_threads: Callable[..., str]) -> None:
    printed = in_threads(the_block('("1f1b", "2bw")'))
    assert printed == "1f1b [0.9, 0.81, 0.729, 0.6561]\n2bw [0.9, 0.8, 0.71, 0.63]\n"
    assert printed in README


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
    rows = {"loss scale"} | {re.split("  +", line)[0] for line in block.splitlines()[1:]}
    source = (Path(__file__).parent.parent / "cli" / "report.py").read_text(encoding="utf-8")
    assert rows == set(re.findall(r'add_row\(\s*"([^"]*)"', source))


COMMANDS = [line for block in SHELL for line in re.sub(r"\\\n", " ", block).splitlines() if " train" in line]


@pytest.mark.parametrize("line", [line for line in COMMANDS if not line.startswith("make")])
def test_the_flags_shown_exist(line: str) -> None:
    words = shlex.split(line, comments=True)
    parsed = build_parser().parse_args(words[words.index("train") :])
    assert find(parsed.schedule).runnable
