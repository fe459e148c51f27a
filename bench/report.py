"""Report: what the benches found, as a table of the terminal, JSON, Markdown and a picture."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Final

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_MISSED: Final = " !"
_COLOURS: Final = ("#9aa5b1", "#2f6db5", "#d9822b", "#5a9e4b")
_ROW_HEIGHT, _BAR_HEIGHT, _LEFT, _WIDTH = 16, 12, 130, 560


@dataclass(frozen=True)
class Section:
    """What one bench found.

    Args:
        name: of the bench.
        title: one line.
        columns, rows: the table; a cell that misses its bar ends with an exclamation mark (see ``marked``).
        note: how to read it.
        bars: for the picture: row -> series -> value; nothing where there is none.
        unit: of these.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str
    bars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    unit: str = ""

    @property
    def misses(self) -> int:
        """Cells that miss their bar."""
        return sum(cell.endswith(_MISSED) for row in self.rows for cell in row)


def marked(text: str, holds: bool) -> str:
    """A cell with a bar."""
    return text if holds else text + _MISSED


def machine() -> dict[str, str | int]:
    """Where this was measured; no name of it."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def _processor() -> str:
    """Its model, which Python knows on some systems and Linux lists in a file."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, model = line.partition(":")
            if name.strip() == "model name":
                return model.strip()
    return platform.processor() or platform.machine()


def print_section(section: Section, console: Console) -> None:
    """The table, as wide as it is."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, heading in enumerate(section.columns):
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True)
    for row in section.rows:
        table.add_row(*(Text(cell, style="bold red" if cell.endswith(_MISSED) else "") for cell in row))
    width = console.width
    console.width = max(width, console.measure(table, options=console.options.update(max_width=1000)).maximum)
    console.print(section.title, style="bold", highlight=False)
    console.print(table)
    console.print(f"{section.note} ! where a bar is missed.", style="dim", highlight=False)
    console.width = width


def write_report(sections: Sequence[Section], folder: Path) -> list[Path]:
    """Write ``bench.json``, ``bench.md`` and a picture for every section that has one; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "bench.json", folder / "bench.md"]
    found = {"machine": machine(), "sections": [asdict(section) for section in sections]}
    paths[0].write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    paths[1].write_text(markdown_of(sections), encoding="utf-8")
    for section in sections:
        if section.bars:
            paths.append(folder / f"{section.name}.svg")
            paths[-1].write_text(svg_of(section), encoding="utf-8")
    return paths


def markdown_of(sections: Sequence[Section]) -> str:
    """All sections, one after the other."""
    where = ", ".join(f"{key} {value}" for key, value in machine().items())
    lines = ["# Measured", "", f"`make bench` on {where}.", ""]
    for section in sections:
        lines += [f"## {section.name}", "", section.title[:1].upper() + section.title[1:] + ".", ""]
        lines += table_lines(section)
        lines += ["", f"{section.note} ! where a bar is missed.", ""]
        if section.bars:
            lines += [f"![{section.title}]({section.name}.svg)", ""]
    return "\n".join(lines)


def table_lines(section: Section) -> list[str]:
    """The table in Markdown."""
    rule = ["---", *["---:"] * (len(section.columns) - 1)]
    return [_line(section.columns), _line(rule), *map(_line, section.rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def svg_of(section: Section) -> str:
    """Horizontal bars, those of one row under each other."""
    series = list(dict.fromkeys(name for values in section.bars.values() for name in values))
    colours = dict(zip(series, _COLOURS))
    most = max(value for values in section.bars.values() for value in values.values())
    parts, top = _legend(colours), 2 * _ROW_HEIGHT
    for label, values in section.bars.items():
        middle = top + _BAR_HEIGHT * len(values) / 2 + 4
        parts.append(f'<text x="{_LEFT - 8}" y="{middle:.0f}" text-anchor="end">{escape(label)}</text>')
        for name, value in values.items():
            length = max(value, 0.0) / most * _WIDTH if most > 0 else 0.0
            parts.append(
                f'<rect x="{_LEFT}" y="{top}" width="{length:.1f}" height="{_BAR_HEIGHT - 1}" fill="{colours[name]}"/>'
            )
            parts.append(f'<text x="{_LEFT + length + 4:.1f}" y="{top + 10}">{value:.1f}{section.unit}</text>')
            top += _BAR_HEIGHT
        top += _ROW_HEIGHT - _BAR_HEIGHT + 4
    size = f'width="{_LEFT + _WIDTH + 80}" height="{top + 8}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10">'
    title = f"<title>{escape(section.title)}</title>"
    return "\n".join([head, title, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _legend(colours: Mapping[str, str]) -> list[str]:
    parts, left = [], _LEFT
    for name, colour in colours.items():
        parts.append(f'<rect x="{left}" y="8" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{left + 14}" y="17">{escape(name)}</text>')
        left += 30 + 7 * len(name)
    return parts
