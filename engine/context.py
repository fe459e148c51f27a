"""Context: what one rank knows about the pipeline it belongs to."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from stagewright.engine.transport.contract import Transport
from stagewright.engine.transport.gloo import GlooTransport
from stagewright.engine.transport.nccl import nccl_transport
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


def default_transport(device: torch.device | None = None) -> Transport:
    """Over the default process group of torch.distributed; a single rank without one needs none.

    Args:
        device: where tensors live; the current GPU where left out and the group is one of GPUs, else the CPU.
    """
    if not dist.is_initialized():
        return ThreadTransport(Hub(1), 0)
    if "nccl" in dist.get_backend_config():
        return nccl_transport(device or torch.device("cuda", torch.cuda.current_device()))
    return GlooTransport(device=device)


def _own_device(local_ranks: int) -> torch.device:
    """The GPU of this rank, shared where there are fewer GPUs than ranks; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def under_torchrun() -> bool:
    """Whether this process was started as one rank of several, by torchrun or alike."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def from_environment() -> Iterator[RankContext]:
    """This process's rank as torchrun says it (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), until the block ends.

    Raises:
        ValueError: the process was not started by torchrun or alike.
    """
    if not under_torchrun():
        raise ValueError("RANK and WORLD_SIZE are not set: start this with torchrun, or use launch_local")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":  # which is also what torchrun sets where nobody has said anything
        torch.set_num_threads(max(1, num_cores() // local_ranks))
    device = _own_device(local_ranks)
    shares_device = device.type == "cuda" and local_ranks > torch.cuda.device_count()
    dist.init_process_group("nccl" if device.type == "cuda" and not shares_device else "gloo")
    transport = default_transport(device)
    try:
        yield context_of(transport)
        transport.gather(b"")  # no rank goes while another may still need it
    except BaseException as error:
        transport.abort(f"rank {transport.rank} failed: {type(error).__name__}: {error}")
        raise
    finally:
        transport.close()
        dist.destroy_process_group()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
