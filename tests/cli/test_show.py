"""`list` and `show` through the entry point."""

import subprocess
import sys

import pytest

from stagewright.cli.main import main
from stagewright.schedules import names

GRID_1F1B = """\
rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 -- .. B1 -- .. B2 -- .. B3 --
rank 1  .. F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 -- .. ..
rank 2  .. .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. .. .. ..
rank 3  .. .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. .. .. ..
"""


def test_the_command_is_installed_and_plain_when_piped() -> None:
    command = [sys.executable, "-m", "stagewright.cli", "show", "1f1b", "--ranks", "4", "--microbatches", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert GRID_1F1B in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_list_has_one_line_for_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert tuple(line.split()[0] for line in lines) == names()
    assert all(len(line.split()) > 3 for line in lines)


def test_show_says_both_bubbles_and_the_peak_stash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "gpipe", "--ranks", "3", "--microbatches", "4", "--forward", "1", "--backward", "1"]) == 0
    out = capsys.readouterr().out
    assert "rank 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..\n" in out
    rows = {line[:15].strip(): line[15:].split() for line in out.splitlines()}
    assert rows["makespan"][0] == "12"
    assert rows["bubble fraction"][0] == "0.3333"  # (P-1) / (M+P-1)
    assert rows["bubble overhead"][0] == "0.5000"  # (P-1) / M
    assert rows["by the formula"][0] == "0.3333"
    assert rows["peak stash"][:3] == ["4", "4", "4"]


@pytest.mark.parametrize(
    "flags",
    [
        ["1f1b", "--ranks", "4", "--microbatches", "4"],
        ["--schedule", "1f1b", "--ranks", "4", "--microbatches", "4"],
        ["PipeDream_Flush", "--micro-batch-size", "8", "--global-batch-size", "32"],
    ],
)
def test_a_schedule_is_selected_in_any_of_the_usual_ways(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *flags]) == 0
    assert GRID_1F1B in capsys.readouterr().out
