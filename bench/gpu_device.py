"""GPU device: what the bench of GPUs asks of a device: to be done, its memory, and what makes its host wait for it.

A CPU is done with everything at once and tells nothing of its memory, so all that runs on a GPU can be tried on it.
"""

import re
import shutil
import subprocess
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from stagewright import engine
from stagewright.bench.report import machine

# What torch's debug mode says of an operation that waits for the GPU.
WAITED: Final = "called a synchronizing CUDA operation"
# Calls of the CUDA runtime in which the host waits, or may: to give memory back is to wait for all that is queued.
WAITING: Final = re.compile(r"cuda(?:(?:Device|Stream|Event)Synchronize|Memcpy|Malloc|Free|HostAlloc|FreeHost)")
_RUNTIME: Final = "cudaLaunchKernel"  # which every step calls: without it the profiler does not see the runtime
_STEP: Final = "a step of the bench"
_ROOT: Final = Path(engine.__file__).parents[1]


class Device:
    """Where the bench computes.

    Args:
        device: where tensors live.
        cuda: what has the functions of ``torch.cuda``; None on a CPU.
    """

    def __init__(self, device: torch.device, cuda: Any = None) -> None:
        self.device = device
        self._cuda = cuda

    def wait(self) -> None:
        """Until all that is queued is done."""
        if self._cuda is not None:
            self._cuda.synchronize(self.device)

    @property
    def allocated(self) -> int:
        """Bytes of this process's tensors, by what was queued so far."""
        return 0 if self._cuda is None else int(self._cuda.memory_allocated(self.device))

    @property
    def peak(self) -> int:
        """The most that this has been since ``restart_peak``."""
        return 0 if self._cuda is None else int(self._cuda.max_memory_allocated(self.device))

    def restart_peak(self) -> None:
        """Let the peak be what is allocated now."""
        if self._cuda is not None:
            self._cuda.reset_peak_memory_stats(self.device)

    def places_of_waits(self, step: Callable[[], object]) -> dict[str, int]:
        """In which places the host waited in a step, and how often, as torch's debug mode sees it."""
        places: Counter[str] = Counter()
        if self._cuda is None:
            return places
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = partial(_note, places)
            self._cuda.set_sync_debug_mode("warn")
            try:
                step()
            finally:
                self._cuda.set_sync_debug_mode("default")
        return dict(places)

    def first_wait(self, step: Callable[[], object]) -> str | None:
        """Where the host would have waited first in a step, in which every wait is an error; None where nowhere.

        A pipeline whose step has ended by this error goes on no more.
        """
        if self._cuda is None:
            return None
        self._cuda.set_sync_debug_mode("error")
        try:
            step()
        except RuntimeError as error:
            if WAITED not in str(error):
                raise
            return place_in(traceback.extract_tb(error.__traceback__))
        finally:
            self._cuda.set_sync_debug_mode("default")
        return None

    def calls_that_wait(self, step: Callable[[], object]) -> dict[str, int] | None:
        """Which calls of the CUDA runtime that wait were made in a step, and how often; None where nobody sees them."""
        if self._cuda is None:
            return None
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler, record_function(_STEP):
            step()
        return calls_within(profiler.events() or [], _STEP)


def device_of(name: str) -> Device:
    """The current GPU, or the CPU."""
    if name == "cpu":
        return Device(torch.device("cpu"))
    return Device(torch.device("cuda", torch.cuda.current_device()), torch.cuda)


class Span(Protocol):
    """From when to when."""

    start: float
    end: float


class Event(Protocol):
    """What a profiler has seen."""

    name: str
    time_range: Span


def calls_within(events: Iterable[Event], name: str) -> dict[str, int] | None:
    """How often each call that waits was begun within the event of a name; None where no call was seen at all."""
    seen = list(events)
    if not any(event.name.startswith(_RUNTIME) for event in seen):
        return None
    spans = [event.time_range for event in seen if event.name == name]
    return dict(
        Counter(
            event.name
            for event in seen
            if WAITING.fullmatch(event.name) and any(span.start <= event.time_range.start <= span.end for span in spans)
        )
    )


def _note(places: Counter[str], message: Warning | str, *_: object, **__: object) -> None:
    """Count a warning of the debug mode; this stands in the place of ``warnings.showwarning``."""
    if WAITED in str(message):
        frames = [frame for frame in traceback.extract_stack()[:-1] if frame.filename != warnings.__file__]
        places[place_in(frames)] += 1


def place_in(frames: Iterable[traceback.FrameSummary]) -> str:
    """Where a stack is in this package, innermost, and what that has called of others."""
    ours, theirs = "", ""
    for frame in frames:
        path = Path(frame.filename)
        if path.is_relative_to(_ROOT) and "site-packages" not in path.relative_to(_ROOT).parts:
            ours, theirs = f"{path.relative_to(_ROOT)}:{frame.lineno} {frame.name}", ""
        else:
            theirs = f"{'/'.join(path.parts[-3:])}:{frame.lineno} {frame.name}"
    return " > ".join(filter(None, (ours, theirs)))


@dataclass(frozen=True, slots=True)
class Waits:
    """What makes the host wait for its device in a step.

    Args:
        places: where, and how often.
        calls: of the CUDA runtime, and how often; None where they cannot be seen.
        first: where a step ends in which waiting is an error; None where it does not, or was not tried.
    """

    places: dict[str, int]
    calls: dict[str, int] | None
    first: str | None = None

    @property
    def never(self) -> bool:
        """Whether it waits for nothing."""
        return not self.places and not self.calls and self.first is None


def machine_of(device: Device, cuda: Any = torch.cuda) -> dict[str, str | int]:
    """Where this is measured, with the GPU and its driver."""
    found = machine()
    if device.device.type == "cpu":
        return found | {"device": "cpu"}
    properties = cuda.get_device_properties(device.device)
    return found | {
        "device": str(properties.name),
        "GiB": round(properties.total_memory / 2**30),
        "multiprocessors": int(properties.multi_processor_count),
        "CUDA": str(torch.version.cuda),
        "driver": driver(),
    }


def driver() -> str:
    """The version of the GPU's driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown"
    arguments = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(arguments, capture_output=True, text=True, timeout=30, check=False)
    return found.stdout.partition("\n")[0].strip() or "unknown"
