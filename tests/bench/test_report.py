"""The report: every way to write it says the same, and marks what misses its bar."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from stagewright.bench.__main__ import main
from stagewright.bench.report import Section, markdown_of, marked, print_section, svg_of, table_lines, write_report

SECTION = Section(
    name="bubble",
    title="how long steps are",
    columns=("schedule", "over"),
    rows=(("1f1b", marked("+3.0%", True)), ("a|b", marked("+9.0%", False))),
    note="Medians.",
    bars={"1f1b": {"ours": 3.0, "torch": 6.0}, "a|b": {"ours": 9.0}},
    unit=" %",
)


def test_what_misses_its_bar_is_marked_and_counted() -> None:
    assert SECTION.rows == (("1f1b", "+3.0%"), ("a|b", "+9.0% !"))
    assert SECTION.misses == 1


def test_a_markdown_table() -> None:
    assert table_lines(SECTION) == ["| schedule | over |", "| --- | ---: |", "| 1f1b | +3.0% |", r"| a\|b | +9.0% ! |"]
    assert "![how long steps are](bubble.svg)" in markdown_of([SECTION])


def test_the_terminal_shows_all_cells() -> None:
    console = Console(width=40, record=True, file=None, quiet=False)
    with console.capture() as capture:
        print_section(SECTION, console)
    printed = capture.get()
    assert "+9.0% !" in printed
    assert "Medians." in printed


def test_bars_are_as_long_as_their_values() -> None:
    root = ElementTree.fromstring(svg_of(SECTION))
    bars = [float(rect.attrib["width"]) for rect in root.iter("{http://www.w3.org/2000/svg}rect") if rect.get("x")]
    legend, values = bars[:2], bars[2:]
    assert legend == [10.0, 10.0]
    assert [value / max(values) for value in values] == pytest.approx([3 / 9, 6 / 9, 1], rel=1e-3)


def test_bars_of_nothing_are_drawn() -> None:
    section = Section("bubble", "none", (), (), "", {"1f1b": {"ours": 0.0}})
    assert 'width="0.0"' in svg_of(section)


def test_files(tmp_path: Path) -> None:
    paths = write_report([SECTION], tmp_path / "new")
    assert [path.name for path in paths] == ["bench.json", "bench.md", "bubble.svg"]
    found = json.loads(paths[0].read_text())
    assert found["sections"][0]["rows"] == [["1f1b", "+3.0%"], ["a|b", "+9.0% !"]]
    assert found["machine"]["cores"] >= 1


def test_an_unknown_bench_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nonsense"])
    assert "there is no bench 'nonsense'" in capsys.readouterr().err
