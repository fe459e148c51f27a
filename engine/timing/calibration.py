"""Calibration: what stages and hops really take, from a few steps of a run, as costs for the simulator."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import median
from time import perf_counter
from typing import Final

from stagewright.engine.timing.trace import NUM_KEPT, History
from stagewright.engine.transport.contract import Transport
from stagewright.engine.value import Layout
from stagewright.schedules import Costs
from stagewright.schedules.fitting import fit_costs

# Rounds of empty messages, whose median tells what a hop takes without its bytes.
_NUM_PROBES: Final = 9
# Whether activation, the stage that needs it, and the bytes of one message.
_SIZE: Final = struct.Struct("<?IQ")


def calibrate(history: History, transport: Transport, num_steps: int = NUM_KEPT) -> Costs:
    """Fit costs to the last steps of a run, in seconds and bytes; all ranks call this alike and get the same.

    F, B, I, W, fused pairs and updates come stage by stage, hops boundary by boundary. What a hop takes beyond an empty
    message is laid to the bandwidth, one for all channels.
    """
    timelines = history.timelines(num_steps)
    costs = fit_costs(timelines)
    sizes = _sizes(history.last(1)[0].layouts, timelines[0].program.num_stages, transport)
    latency = _empty_hop(transport)
    assert isinstance(costs.send, tuple), "fitted costs have a number for every stage"
    return with_bandwidth(costs, costs.send, sizes, latency)


def with_bandwidth(costs: Costs, hops: Sequence[float], sizes: Sequence[float], latency: float) -> Costs:
    """Tell apart, of what each hop takes, the part that grows with its bytes.

    Args:
        costs: to which this is added.
        hops: what each boundary's hop takes in all.
        sizes: the bytes that cross it.
        latency: of a hop without bytes.
    """
    slopes = [size / (hop - latency) for size, hop in zip(sizes, hops) if size and hop > latency]
    bandwidth = median(slopes) if slopes else inf
    send = tuple(max(hop - size / bandwidth, 0.0) for size, hop in zip(sizes, hops))
    return replace(costs, send=send, message_bytes=tuple(sizes), bandwidth=bandwidth)


def _sizes(own: Mapping[tuple[bool, int], Layout], num_stages: int, transport: Transport) -> list[float]:
    """The bytes that cross from each stage to the next, or come back as their gradient, whichever are more."""
    data = b"".join(_SIZE.pack(forward, stage, layout.num_bytes) for (forward, stage), layout in own.items())
    sizes = [0.0] * num_stages
    for letter in transport.gather(data):
        for forward, stage, size in _SIZE.iter_unpack(letter):
            boundary = stage - 1 if forward else stage
            sizes[boundary] = max(sizes[boundary], float(size))
    return sizes


def _empty_hop(transport: Transport) -> float:
    """Half of what it takes to gather nothing from all ranks: there and back; the same number on all of them."""
    rounds = []
    for _ in range(_NUM_PROBES):
        start = perf_counter()
        transport.gather(b"")
        rounds.append(perf_counter() - start)
    of_ranks: list[float] = [
        struct.unpack("<d", data)[0] for data in transport.gather(struct.pack("<d", median(rounds) / 2))
    ]
    return min(of_ranks)
