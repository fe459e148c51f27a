"""Readers of files and messages from anywhere: attacked by a coverage-guided fuzzer, and with all that ever broke one.

``pytest -m slow tests/fuzz`` attacks each of them for its share of ten minutes. What breaks one is left in
``tests/data/crashers``, and is read again by every run of the tests from then on.
"""

import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import SystemRandom
from typing import Final

import pytest
from readers import Reader, readers
from watch import EXECUTION, Executed, Watch

FUZZER: Final = Path(__file__).parent / "fuzzer.py"
CRASHERS: Final = Path(__file__).parent.parent / "data" / "crashers"
NAMES: Final = (
    "program", "recording", "profile", "index", "index-file", "shard", "latest", "frame", "layout", "answer", "record",
    "environment", "flags", "costs", "cut",
)  # fmt: skip
SECONDS: Final = 600


@cache
def reader_of(name: str) -> Reader:
    reader = readers()[name]
    for seed in reader.seeds:
        assert reader.accepts(seed), seed
    return reader


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def test_none_goes_unread() -> None:
    assert set(readers()) == set(NAMES)
    assert {folder.name for folder in CRASHERS.iterdir()} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_was_read_is_executed_or_raises_anything_but_a_value_error(name: str, watch: Watch) -> None:
    """All that ever broke a reader, and what it takes, cut off at many places."""
    reader = reader_of(name)
    cases = [path.read_bytes() for path in sorted((CRASHERS / name).glob("*"))]
    for seed in reader.seeds:
        cases += [seed[:end] for end in range(0, len(seed), max(1, len(seed) // 40))]
    with watch.on():
        for case in cases:
            reader.accepts(case)


@pytest.mark.parametrize("code", ["eval('1')", "__import__('this')", "__import__('os').system('true')"])
def test_the_watch_sees_what_is_executed(code: str, watch: Watch) -> None:
    compiled = compile(code, "hostile", "eval")
    with pytest.raises(Executed), watch.on():
        eval(compiled)
    assert "exec" in EXECUTION


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_fuzzer_finds_nothing(name: str, tmp_path: Path) -> None:
    if find_spec("atheris") is None:
        pytest.skip("the fuzzer is atheris, which has no package for this system")
    corpus, found, seed = tmp_path / "corpus", tmp_path / "found", SystemRandom().randrange(1, 2**31)
    for folder in (corpus, found):
        folder.mkdir()
    crashers = [path.read_bytes() for path in sorted((CRASHERS / name).glob("*"))]
    for index, case in enumerate([*reader_of(name).seeds, *crashers]):
        (corpus / str(index)).write_bytes(case)
    command = [sys.executable, *map(str, (FUZZER, name, corpus, found, SECONDS // len(NAMES), seed))]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    for path in found.iterdir():
        (CRASHERS / name).mkdir(exist_ok=True)
        shutil.copy(path, CRASHERS / name)
    said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("INFO: Instrumenting"))
    assert done.returncode == 0, f"with seed {seed}:\n{done.stdout[-500:]}{said[-4000:]}"
    assert "number_of_executed_units" in done.stderr
