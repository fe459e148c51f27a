"""Publish: the README shows what the kept report says, to the letter."""

import json
import shutil
from pathlib import Path

import pytest

from stagewright.bench.publish import BEGIN, END, KEPT, block_of, main, with_block

ROOT = Path(__file__).parents[2]


def test_the_readme_shows_the_kept_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = Path("README.md").read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    assert with_block(text, block_of(KEPT)) == text


def test_a_report_is_copied_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = tmp_path / "build" / "bench"
    shutil.copytree(ROOT / KEPT, report)
    found = json.loads((report / "bench.json").read_text())
    for section in found["sections"]:
        if section["name"] == "bubble":
            section["rows"] = [row for row in section["rows"] if row[0] == "1f1b"]
            section["rows"][0][section["columns"].index("over")] = "+77.0% !"
    (report / "bench.json").write_text(json.dumps(found))
    Path("README.md").write_text(f"Before.\n{BEGIN}\nold\n{END}\nAfter.\n")
    assert main([]) == 0
    text = Path("README.md").read_text()
    assert text.startswith(f"Before.\n{BEGIN}\n`make bench` on system")
    assert text.endswith(f"![{found['sections'][0]['title']}](bench/results/bubble.svg)\n{END}\nAfter.\n")
    (row,) = [line for line in text.splitlines() if line.startswith("| 1f1b |")]
    assert "| +77.0% ! |" in row
    assert "old" not in text
    assert (KEPT / "bubble.svg").read_bytes() == (report / "bubble.svg").read_bytes()
