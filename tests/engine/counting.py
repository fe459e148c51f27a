"""A transport that notes what it sends."""

from collections.abc import Callable
from typing import Any

from stagewright.engine.launch.threads import run_threads
from stagewright.engine.transport.hub import Hub
from stagewright.engine.transport.threads import ThreadTransport


class CountingTransport(ThreadTransport):
    """Threads, with (kind, bytes) of every message in ``sent``."""

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(hub, rank)
        self.sent: list[tuple[str, int]] = []

    def send(self, channel: Any, packed: Any, stage: int, microbatch: int) -> None:
        self.sent.append((channel.kind, sum(tensor.numel() * tensor.itemsize for tensor in packed.tensors)))
        super().send(channel, packed, stage, microbatch)

    def gather(self, data: bytes) -> list[bytes]:
        self.sent.append(("all to all", len(data)))
        return super().gather(data)


def on_counting_threads(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Run ``function(context, *args)`` in a thread a rank, each with a CountingTransport."""
    hub = Hub(num_ranks)
    return run_threads(function, hub, [CountingTransport(hub, rank) for rank in range(num_ranks)], args)
