"""Bytes that are taken and given back, as torch's own allocator counts them."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile

# A few scalars may come on top of what is counted.
SCALARS = 4096


class Meter:
    """Changes of the memory that this thread's tensors take, in order."""

    def __init__(self) -> None:
        self.changes: list[int] = []

    @property
    def held(self) -> int:
        """What has come on top in the end."""
        return sum(self.changes)

    @property
    def peak(self) -> int:
        """What had come on top at most."""
        highest = level = 0
        for change in self.changes:
            level += change
            highest = max(highest, level)
        return highest


@contextmanager
def metering() -> Iterator[Meter]:
    """Count until the block ends; the meter tells afterwards."""
    meter = Meter()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield meter
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())  # type: ignore[union-attr]
    meter.changes = [event.nbytes() for event in events if event.name() == "[memory]"]
