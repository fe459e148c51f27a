"""`list` and `show` through the entry point."""

import io
import json
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

import pytest
from rich.console import Console

from stagewright.cli.main import main
from stagewright.cli.show import show_schedule
from stagewright.schedules import Costs, Order, Program, create, names, registry, simulate
from stagewright.schedules.drawing import html_text, svg_text
from stagewright.schedules.drawing.palettes import hexadecimal, palette_of
from stagewright.schedules.library import OneFOneB

GRID_1F1B = """\
rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 -- .. B1 -- .. B2 -- .. B3 --
rank 1  .. F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 -- .. ..
rank 2  .. .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. .. .. ..
rank 3  .. .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. .. .. ..
"""
SHAPE = ["--ranks", "4", "--microbatches", "8"]


def figures_of(out: str) -> dict[str, list[str]]:
    """The words behind each name of the closing figures."""
    return {line[:17].strip(): line[17:].split() for line in out.splitlines()}


def test_the_command_is_installed_and_plain_when_piped() -> None:
    command = [sys.executable, "-m", "stagewright.cli", "show", "1f1b", "--ranks", "4", "--microbatches", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert GRID_1F1B in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    command = f"{sys.executable} -m stagewright.cli show gpipe --ranks 8 --microbatches 64 --format json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_list_has_one_line_for_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert tuple(line.split()[0] for line in lines) == names()
    assert all(len(line.split()) > 3 for line in lines)


def test_show_says_every_bubble_and_the_peak_stash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "gpipe", "--ranks", "3", "--microbatches", "4", "--costs", "F=1,B=1"]) == 0
    out = capsys.readouterr().out
    assert "rank 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..\n" in out
    rows = figures_of(out)
    assert rows["makespan"][0] == "12"
    assert rows["bubble fraction"][0] == "0.3333"  # (P-1) / (M+P-1)
    assert rows["bubble overhead"][0] == "0.5000"  # (P-1) / M
    assert rows["span bubble"][0] == "0.3333"
    assert rows["steady bubble"][0] == "0.3333"
    assert rows["by the formula"][0] == "0.3333"
    assert rows["peak stash"][:3] == ["4", "4", "4"]


def test_the_figures_differ_where_the_measures_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "zb-h2", *SHAPE]) == 0
    rows = figures_of(capsys.readouterr().out)
    assert rows["bubble fraction"][0] == "0.1111"  # 3 idle of 27
    assert rows["span bubble"][0] == "0.0000"


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


def test_an_asynchronous_schedule_shows_three_batches_with_versions_and_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["show", "2bw", "--ranks", "2", "--microbatches", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 ranks, 2 stages, 2 microbatches, 3 batches\n" in out
    assert "rank 1  ..   F0@0 B0@0 --   F1@0 B1@0 --  |F2@0 B2@0" in out
    assert "| optimizer step   @ weight version" in out
    assert figures_of(out)["steady bubble"][0] == "0.0000"


def test_the_number_of_batches_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "1f1b", "--ranks", "2", "--microbatches", "2", "--steps", "2"]) == 0
    assert "rank 0  F0 F1 .. .. B0 -- .. B1 --|F2 F3 .. .. B2 -- .. B3 --\n" in capsys.readouterr().out
    assert main(["show", "2bw", "--ranks", "2", "--microbatches", "2", "--steps", "1"]) == 0
    out = capsys.readouterr().out
    assert "2 microbatches\n" in out
    assert "steady bubble" not in out  # one batch of an asynchronous schedule does not show it


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["interleaved", "--chunks", "2"], "small letters: second chunk"),
        (["interleaved", "--chunks", "4"], "in front: the stage"),
        (["dualpipe"], "& fused pair   small letters: second direction"),
        (["zb-h1"], "F forward   I input gradient   W weight gradient   -- goes on   .. idle\n"),
    ],
)
def test_the_key_explains_what_occurs(flags: list[str], key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *flags, *SHAPE]) == 0
    assert key in capsys.readouterr().out


def test_the_timeline_has_the_given_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "1f1b", "--ranks", "2", "--microbatches", "3", "--costs", "F=1,I=1.3,W=0.7,send=0.1"]) == 0
    assert "rank 0  F0 F1 ...... B0--- F2 B1--- .. B2---\n" in capsys.readouterr().out


@dataclass(frozen=True)
class Planner(OneFOneB):
    """Takes the deep warmup where sends take time."""

    costs: Costs = field(default_factory=Costs)

    name: ClassVar[str] = "planner"
    aliases: ClassVar[tuple[str, ...]] = ()

    def order(self, rank: int) -> Order:
        """That of 1F1B."""
        return replace(self, costs=Costs(), deep_warmup=True).order(rank) if self.costs.send else super().order(rank)


def test_a_schedule_that_plans_gets_the_costs_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(registry._SCHEDULES, "planner", Planner)
    row = {}
    for send in ("0", "1"):
        assert main(["show", "planner", "--ranks", "3", "--microbatches", "6", "--costs", f"F=1,B=1,send={send}"]) == 0
        (row[send],) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rank 0")]
    assert row["0"].startswith("rank 0  F0 F1 F2 .. .. B0 F3")
    assert row["1"].startswith("rank 0  F0 F1 F2 F3 F4 .. .. .. .. B0 F5")


def test_every_format_is_what_its_function_makes(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = create("2bw", num_ranks=4, num_microbatches=8)
    timeline = simulate(schedule.program(steps=3))
    title = f"2bw: {schedule.summary}"
    outputs = {}
    for form in ("svg", "html", "csv", "json", "trace"):
        assert main(["show", "2bw", *SHAPE, "--format", form, "--palette", "deepseek"]) == 0
        outputs[form] = capsys.readouterr().out
    assert outputs["svg"] == svg_text(timeline, title=title, palette="deepseek")
    assert outputs["html"] == html_text(timeline, title=title, palette="deepseek")
    assert outputs["csv"] == timeline.program.to_csv()
    assert json.loads(outputs["json"])["num_batches"] == 3
    assert json.loads(outputs["trace"])["otherData"]["title"] == title
    fills = {
        rect.get("fill") for rect in ElementTree.fromstring(outputs["svg"]).iter("{http://www.w3.org/2000/svg}rect")
    }
    colors = palette_of("deepseek")
    assert {hexadecimal(colors.color(kind, version=version)) for kind in "FB" for version in (0, 1)} <= fills


def test_csv_can_be_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "interleaved", *SHAPE, "--chunks", "2", "--format", "csv"]) == 0
    program = create("interleaved", num_ranks=4, num_microbatches=8, num_chunks=2).program()
    assert Program.from_csv(capsys.readouterr().out).streams == program.streams


@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("a.svg", "<svg "),
        ("a.html", "<!DOCTYPE html>"),
        ("a.csv", "0F0,"),
        ("a.json", '{\n "title"'),
        ("a.trace.json", '{"displayTimeUnit"'),
        ("a.TXT", "1f1b: "),
        ("a", "1f1b: "),
    ],
)
def test_the_name_of_the_file_tells_the_format(
    name: str, beginning: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "1f1b", *SHAPE, "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_text("utf-8").startswith(beginning)
    assert capsys.readouterr().out == ""


def test_a_file_gets_what_a_pipe_gets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "1f1b", *SHAPE]) == 0
    assert main(["show", "1f1b", *SHAPE, "-o", str(tmp_path / "grid.txt")]) == 0
    assert (tmp_path / "grid.txt").read_text("utf-8") == capsys.readouterr().out


def test_a_refusal_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "picture.svg"
    assert main(["show", "dualpipe", "--ranks", "4", "--microbatches", "7", "-o", str(file)]) == 2
    assert "dualpipe needs an even number of microbatches" in capsys.readouterr().err
    assert not file.exists()


def test_a_terminal_gets_colours_in_panels_no_wider_than_it() -> None:
    schedule = create("1f1b", num_ranks=4, num_microbatches=16)
    terminal = io.StringIO()
    console = Console(file=terminal, width=80, force_terminal=True, color_system="truecolor", _environ={})
    show_schedule(console, schedule, simulate(schedule.program(), Costs()), palette_of("torch"))
    red, green, blue = palette_of("torch").color("F")
    assert f"48;2;{red};{green};{blue}" in terminal.getvalue()
    assert terminal.getvalue().count("rank 0") > 1


def test_one_schedule_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "1f1b", "--schedule", "gpipe"]) == 2
    assert capsys.readouterr().err == "stagewright show: show draws one schedule: got 1f1b and --schedule gpipe\n"
    assert main(["show", "--schedule", "gpipe", *SHAPE]) == 0
    assert capsys.readouterr().out.startswith("gpipe:")


def test_a_name_that_says_no_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.png"
    assert main(["show", "-o", str(file)]) == 2
    assert ".png is none of .trace.json .txt .svg" in capsys.readouterr().err
    assert not file.exists()
    assert main(["show", "-o", str(file), "--format", "svg"]) == 0
    assert file.read_text().startswith("<svg")


@pytest.mark.parametrize("command", ["show", "compare"])
def test_a_shape_that_would_fill_the_memory_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--ranks", "100000000"]) == 2
    assert "computations: take a smaller shape, of at most 4000000" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["list", "show", "compare"])
def test_output_that_cannot_be_written_is_one_line(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "stagewright.cli", command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == f"stagewright {command}: cannot write the output: No space left on device\n"
