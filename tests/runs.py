"""Trainings as processes of this machine: started by a command, watched through the metrics they write, and killed."""

import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

# A model of which a step takes a few milliseconds, on text that is there at once.
TINY = "--layers 3 --hidden 8 --heads 2 --sequence 8 --batch-size 4 --microbatches 2 --dtype float64"
PATIENCE = 240.0


def write_text(folder: Path) -> Path:
    """Text to train on."""
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"the quick brown fox number {number} jumps over the lazy dog\n" * 3)
    return folder


class Run:
    """A command line that runs as it would for someone who has activated the environment, in a session of its own.

    Args:
        command: the line.
        variables: of its environment.
    """

    def __init__(self, command: str, **variables: str) -> None:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        # What it starts is known by this, whatever session that makes for itself.
        self._mark = f"RUN={secrets.token_hex(8)}"
        # Files are never full, as pipes are.
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
            # Ranks share few cores here: let their threads not spin.
            env={
                **os.environ,
                "PATH": path,
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_WAIT_POLICY": "PASSIVE",
                **dict([self._mark.split("=")]),
                **variables,
            },
        )

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group."""
        return self._process.pid

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return _read(self._out)

    @property
    def err(self) -> str:
        """The same of its standard error."""
        return _read(self._err)

    def wait(self) -> int:
        """Wait for its end and return its exit code."""
        return self._process.wait(PATIENCE)

    def finish(self) -> str:
        """Wait until it has succeeded, and return what it has printed."""
        assert self.wait() == 0, self.err
        return self.out

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait for something that happens while it runs."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self._process.poll() is None, f"it ended before, with {self._process.returncode}: {self.err}"
            assert time.monotonic() < deadline, f"it takes too long: {self.err}"
            time.sleep(0.005)

    def end(self) -> None:
        """Leave nothing of it behind, whatever has become of it."""
        while pids := self.still_running():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._out.close()
        self._err.close()

    def still_running(self) -> list[int]:
        """The processes that it has started, and itself, however they are related now."""
        return [pid for pid, variables in processes() if self._mark in variables]

    def has_left_nothing(self) -> bool:
        """Whether all that it has started ends within some seconds after it."""
        deadline = time.monotonic() + 10
        while self.still_running() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.still_running()

    def ranks(self) -> dict[int, int]:
        """The process ids of the ranks that a torchrun has started, by rank."""
        ranks = {}
        for pid, variables in processes():
            if self._mark in variables:
                ranks |= {int(variable[5:]): pid for variable in variables if variable.startswith("RANK=")}
        return ranks


def processes() -> Iterator[tuple[int, list[str]]]:
    """All processes that may be looked at, and the environment that each was started with."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            yield int(environment.parent.name), environment.read_bytes().decode(errors="replace").split("\0")


def losses_of(metrics: Path) -> list[tuple[int, float]]:
    """Every step that was made, in the order in which they were, and its loss."""
    text = metrics.read_text() if metrics.exists() else ""
    return [(int(step), float(loss)) for step, loss in re.findall(r'"step": (\d+), "loss": ([^,]+),', text)]


def losses_in(metrics: Path) -> dict[int, float]:
    """The loss of every step; where a step was made twice, as after a crash, that of the last time."""
    return dict(losses_of(metrics))


def has_made(metrics: Path, num_steps: int) -> bool:
    """Whether so many steps were made, of which some may have been lost."""
    return len(losses_of(metrics)) >= num_steps


def _read(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace")
