"""Publish: the README shows what the kept report says, to the letter."""

import json
import re
import shutil
from pathlib import Path

import pytest

from stagewright.bench.publish import BEGIN, END, FILES, KEPT, block_of, main, with_block

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
    for name in FILES:
        assert (KEPT / name).read_bytes() == (report / name).read_bytes()


def test_every_picture_of_the_report_is_kept_with_it() -> None:
    pictures = re.findall(r"\]\((.*?\.svg)\)", (ROOT / KEPT / "bench.md").read_text(encoding="utf-8"))
    assert sorted(pictures) == sorted(name for name in FILES if name.endswith(".svg"))
    assert all((ROOT / KEPT / name).is_file() for name in FILES)


@pytest.mark.parametrize("lost", FILES)
def test_half_a_report_changes_nothing(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = tmp_path / "build" / "bench"
    shutil.copytree(ROOT / KEPT, report)
    (report / lost).unlink()
    text = f"{BEGIN}\nold\n{END}\n"
    Path("README.md").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert Path("README.md").read_text() == text
    assert not KEPT.exists()


def test_it_runs_where_the_readme_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "start this from the root of the repository" in capsys.readouterr().err
