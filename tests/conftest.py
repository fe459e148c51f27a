"""Shared by all tests."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Tests, and the processes they start, import the modules that stand beside them, such as ``plain``.
sys.path.extend(str(Path(__file__).parent / folder) for folder in (".", "engine", "fuzz", "models", "schedules"))

# Ranks of a test share few cores: one thread each, in this process and in those that it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background lets them ignore Ctrl-C, and they all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Nothing asserts how long something took: a shared machine may be slow.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Compute with one thread, so that results do not depend on the machine."""
    torch.set_num_threads(1)
