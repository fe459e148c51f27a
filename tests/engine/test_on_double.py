"""The whole engine suite on the double of NCCL: whatever the other tests run on threads keeps NCCL's rules as well."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from on_double import CHANGING_SHAPES, ELSEWHERE, is_elsewhere

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("test_*.py"))
NUM_PARTS = 3


def names_in(file: str) -> set[str]:
    """The names of all tests in a file."""
    tree = ast.parse((HERE / f"{file}.py").read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("listed", [ELSEWHERE, CHANGING_SHAPES], ids=["left out", "changing shapes"])
def test_whatever_is_listed_exists(listed: Mapping[str, object]) -> None:
    assert set(listed) <= {file.stem for file in FILES}
    for file, tests in listed.items():
        if not isinstance(tests, str):
            assert isinstance(tests, Mapping | tuple)
            assert set(tests) <= names_in(file), f"of {file}"
            assert tests


def test_every_test_that_is_left_out_has_a_reason() -> None:
    for reason in ELSEWHERE.values():
        for text in [reason] if isinstance(reason, str) else reason.values():
            assert len(text.split()) > 3


def test_a_new_test_is_on_the_double() -> None:
    assert not is_elsewhere("test_something_new", "test_it", {})
    assert not is_elsewhere("test_mesh", "test_something_new", {"kind": "threads"})
    assert is_elsewhere("test_mesh", "test_something_new", {"kind": "gloo"})
    assert is_elsewhere("test_gloo", "test_something_new", {})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_the_whole_engine_suite_passes_on_the_double(part: int) -> None:
    files = [str(file) for file in FILES[part::NUM_PARTS]]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "on_double", *files]
    run = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    told = re.search(
        r"^(\d+) of the (\d+) tests that passed ran ranks on the double of NCCL$", run.stdout, re.MULTILINE
    )
    assert told is not None, run.stdout[-5000:]
    assert int(told[1]) > 100
