"""Recorder: notes the moments at which instructions start and end, by the clock of the device that computes them.

On a CPU such a moment is a time. A GPU runs behind its host, which only queues: there it is an event in the stream, and
its time is read after the step, so that the host never waits for the GPU within one.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Final, Protocol, TypeAlias

import torch

# What a recorder notes: seconds on the host's clock, or an event of a GPU.
Moment: TypeAlias = Any


class Recorder(Protocol):
    """Notes moments, and says later when they were; both ends of all its times are on the host's clock."""

    @property
    def mark(self) -> Callable[[], Moment]:
        """Note this moment: that at which all that was queued so far will be done."""
        ...

    def seconds(self, moments: Sequence[Moment]) -> list[float]:
        """When they were, by ``perf_counter``; waits for the last of them."""
        ...


class HostRecorder:
    """The host computes, so its own clock tells."""

    mark: Final = staticmethod(perf_counter)

    def seconds(self, moments: Sequence[Moment]) -> list[float]:
        """They are times already."""
        return list(moments)


class EventRecorder:
    """A GPU computes: pairs of events, resolved after the step.

    Args:
        device: whose current stream is watched.
        cuda: what has ``Event`` and ``current_stream``.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda

    def mark(self) -> Moment:
        """Put an event into the stream."""
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def seconds(self, moments: Sequence[Moment]) -> list[float]:
        """Count from the first moment, and place that by an event that has just passed.

        The time between two events is a float of 32 bits, so it is precise only between events that are near.
        """
        if not moments:
            return []
        first, now = moments[0], self.mark()
        now.synchronize()
        start = perf_counter() - first.elapsed_time(now) / 1e3
        return [start + first.elapsed_time(moment) / 1e3 for moment in moments]


def recorder_of(device: torch.device) -> Recorder:
    """What records the computations of a device."""
    return EventRecorder(device) if device.type == "cuda" else HostRecorder()
