"""A plugin, ``pytest -p threads_alone``, under which a test that starts a process is skipped: what remains are threads.

Python's warnings may be errors under it, but for those that torch gives itself when it compiles.
"""

import multiprocessing.process
import subprocess
from typing import Any, NoReturn

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Leave torch its own."""
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit:DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody starts a process."""
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", _skip)
    monkeypatch.setattr(subprocess.Popen, "__init__", _skip)


def _skip(*_: Any, **__: Any) -> NoReturn:
    pytest.skip("starts a process")
