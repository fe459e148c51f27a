"""Publish a report of `make bench`: keep it in the repository, and put its table and picture into the README.

`python -m stagewright.bench.publish [DIR]`, from the root of the repository: no figure of the README's section
"Measured" is written by hand.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stagewright.bench.__main__ import FOLDER
from stagewright.engine.errors import described

KEPT: Final = Path("bench/results")
README: Final = Path("README.md")
FILES: Final = ("bench.json", "bench.md", "bubble.svg", "throughput.svg")
BEGIN, END = "<!-- begin: python -m stagewright.bench.publish -->", "<!-- end -->"

# Heading, and the section and column of the report that it shows.
_COLUMNS: Final = (
    ("bubble: simulated", "bubble", "simulated"),
    ("measured", "bubble", "measured"),
    ("over the ideal", "bubble", "over"),
    ("torch over", "bubble", "torch over"),
    ("CPU an instruction, ours / torch", "overhead", "ratio of CPU [95 %]"),
    ("step, ours / torch", "throughput", "ours / torch [95 %]"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Copy the files of a report and rewrite the README's block."""
    parser = argparse.ArgumentParser(prog="python -m stagewright.bench.publish", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="the report (default %(default)s)")
    folder: Path = parser.parse_args(arguments).folder
    if not README.is_file() or BEGIN not in README.read_text(encoding="utf-8"):
        parser.error(f"there is no README.md with the line {BEGIN} here: start this from the root of the repository")
    try:
        text = with_block(README.read_text(encoding="utf-8"), block_of(folder))
        files = {name: (folder / name).read_bytes() for name in FILES}
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{folder} holds no whole report of `make bench` ({described(error)})")
    KEPT.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (KEPT / name).write_bytes(data)
    README.write_text(text, encoding="utf-8")
    return 0


def with_block(text: str, block: str) -> str:
    """A text with what stands between the two marks replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{block}{END}{after}"


def block_of(folder: Path) -> str:
    """What the README shows of a report: where it was measured, the table, the picture."""
    found = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    sections = {section["name"]: section for section in found["sections"]}
    where = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
    lines = [
        f"`make bench` on {where}; [the whole report]({KEPT.as_posix()}/bench.md).",
        f"{_sentence(sections['bubble']['title'])}",
        f"{_sentence(sections['overhead']['title'])}",
        f"{_sentence(sections['throughput']['title'])} ! marks a bar that is missed.",
        "",
        _line(["schedule", *(heading for heading, *_ in _COLUMNS)]),
        _line(["---", *["---:"] * len(_COLUMNS)]),
        *(_line([row[0], *_cells(row[0], sections)]) for row in sections["bubble"]["rows"]),
        "",
        f"![{sections['bubble']['title']}]({KEPT.as_posix()}/bubble.svg)",
        "",
    ]
    return "\n".join(lines)


def _cells(schedule: str, sections: Mapping[str, Any]) -> list[str]:
    """A schedule's cell of every column; nothing where it was not measured."""
    return [_cell(schedule, sections[section], column) for _, section, column in _COLUMNS]


def _cell(schedule: str, section: Mapping[str, Any], column: str) -> str:
    index = section["columns"].index(column)
    against_torch = "against" not in section["columns"]
    rows = [row for row in section["rows"] if row[0] == schedule and (against_torch or row[1] == "torch")]
    return str(rows[0][index]) if rows else ""


def _sentence(title: str) -> str:
    return title[:1].upper() + title[1:] + "."


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
