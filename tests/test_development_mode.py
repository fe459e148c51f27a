"""The thread-backed suite passes under Python's development mode with every warning an error (see CONTRIBUTING)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_threads_pass_in_development_mode() -> None:
    """As CONTRIBUTING has it: what starts a process is skipped."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-m", "pytest", "-q", "-p", "threads_alone", "tests/engine"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) > 1000
