"""Context: what one rank knows about the pipeline it belongs to."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from stagewright.engine.transport.contract import Transport
from stagewright.engine.transport.gloo import GlooTransport
from stagewright.engine.transport.threads import Hub, ThreadTransport


@dataclass(frozen=True)
class RankContext:
    """One rank of a pipeline.

    Args:
        rank: this rank.
        num_ranks: ranks of the pipeline.
        device: where its tensors live.
        transport: connects it to the others.
    """

    rank: int
    num_ranks: int
    device: torch.device
    transport: Transport


def context_of(transport: Transport) -> RankContext:
    """The context that belongs to a transport."""
    return RankContext(transport.rank, transport.num_ranks, transport.device, transport)


def default_transport() -> Transport:
    """Over the default process group of torch.distributed; a single rank without one needs none."""
    if dist.is_available() and dist.is_initialized():
        return GlooTransport()
    return ThreadTransport(Hub(1), 0)


def under_torchrun() -> bool:
    """Whether this process was started as one rank of several, by torchrun or alike."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def from_environment() -> Iterator[RankContext]:
    """This process's rank as torchrun says it (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); leaves the group at the end.

    Raises:
        ValueError: the process was not started by torchrun or alike.
    """
    if not under_torchrun():
        raise ValueError("RANK and WORLD_SIZE are not set: start this with torchrun, or use launch_local")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if "OMP_NUM_THREADS" not in os.environ or local_ranks > 1:
        torch.set_num_threads(max(1, num_cores() // local_ranks))
    dist.init_process_group("gloo")
    transport = GlooTransport()
    try:
        yield context_of(transport)
        dist.barrier()
    finally:
        transport.close()
        dist.destroy_process_group()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
