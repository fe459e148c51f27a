"""README's examples run as they are pasted."""

import re
import subprocess
import sys
from pathlib import Path

from stagewright.schedules import Costs, create, simulate
from stagewright.schedules.drawing import grid_text

README = (Path(__file__).parent.parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(code: str, folder: Path) -> str:
    """Run a pasted example as a script of its own."""
    script = folder / "pasted.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_embedding_example_trains(tmp_path: Path) -> None:
    (example,) = [code for code in PYTHON if "launch_local(train" in code]
    losses = eval(run(example, tmp_path), {"__builtins__": {}}, {"None": None})  # it prints a list of numbers
    assert losses[:3] == [None, None, None]
    assert losses[3] < 1.5  # the targets have a variance of 4


def test_the_program_example_prints_the_figures_of_1f1b(tmp_path: Path) -> None:
    (example,) = [code for code in PYTHON if "Program.from_csv" in code]
    assert run(example, tmp_path).splitlines()[-1] == "33.0 0.2727272727272727 (4, 3, 2, 1)"


def test_the_grid_is_that_of_1f1b() -> None:
    grid = grid_text(simulate(create("1f1b", num_ranks=4, num_microbatches=6).program(), Costs()))
    assert grid in README
