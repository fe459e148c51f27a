"""Context: what one rank knows about the pipeline it belongs to."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from stagewright.engine.errors import NotFiniteError, PeerError, described
from stagewright.engine.launch.environment import started_rank
from stagewright.engine.launch.meeting import meet
from stagewright.engine.transport.contract import Transport
from stagewright.engine.transport.gloo import GlooTransport
from stagewright.engine.transport.hub import Hub
from stagewright.engine.transport.nccl import nccl_transport
from stagewright.engine.transport.threads import ThreadTransport


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


# How long a rank that has failed keeps its connections, for others that are busy to hear of it.
_FAREWELL_SECONDS: Final = 1.0
# How long the others wait for it to print its traceback.
_TRACEBACK_SECONDS: Final = 2.0


@contextmanager
def from_environment() -> Iterator[RankContext]:
    """This process's rank as its launcher says it, until the block ends.

    torchrun, mpirun (Open MPI, MPICH, Intel MPI) and srun say it in environment variables. Ranks meet at MASTER_ADDR
    and MASTER_PORT, which torchrun always gives; from srun, and from mpirun on one machine, they follow by themselves.
    Rank i of a machine computes on its i-th GPU; ranks share GPUs where there are fewer.

    Raises:
        ValueError: the process was started by none of them, or what its variables say is incomplete or contradicts
            itself.
    """
    started = started_rank()
    if started is None:
        raise ValueError(
            "RANK and WORLD_SIZE are not set: start this with torchrun, srun or mpirun, or use launch_local"
        )
    meeting = meet(started)
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":  # which is also what torchrun sets where nobody has said anything
        torch.set_num_threads(max(1, num_cores() // meeting.num_local_ranks))
    dist.init_process_group(meeting.backend, store=meeting.store, rank=started.rank, world_size=started.num_ranks)
    transport = default_transport(meeting.device)
    # Apart from the transport, on which a rank that has returned sends no more.
    farewell = GlooTransport(_host(transport).group, is_watched=False)
    try:
        yield context_of(transport)
        transport.leave()
        farewell.gather(b"")  # no rank goes while another may still need it
    except BaseException as error:
        tell_end(transport, error)
        farewell.abort(reason_of(transport, error))
        _part(transport, error)
        raise
    finally:
        transport.close()
        farewell.close()
        dist.destroy_process_group()


def _part(transport: Transport, error: BaseException) -> None:
    """The rank that has failed is heard by all before it goes, and has printed its traceback before any other goes.

    A launcher ends all ranks as soon as one of them has ended, and so whoever has not come to its traceback yet.
    """
    if not isinstance(error, Exception) or transport.num_ranks == 1:
        return
    if isinstance(error, PeerError):
        _host(transport).let_another_go_first(_TRACEBACK_SECONDS)
    else:
        time.sleep(_FAREWELL_SECONDS)


def reason_of(transport: Transport, error: BaseException) -> str:
    """Why a rank has failed, in words, where it has not said so in a step."""
    if isinstance(error, PeerError):
        return str(error)
    place = transport.progress.place
    where = "" if place.step < 0 else f" {place}"
    return f"{transport.progress.name} failed{where}: {described(error)}"


def tell_end(transport: Transport, error: BaseException) -> None:
    """Tell the other ranks that an error has ended this one, unless it ends them all by itself."""
    if isinstance(error, NotFiniteError):
        transport.leave()
    else:
        transport.abort(reason_of(transport, error))


def _host(transport: Transport) -> GlooTransport:
    """What connects all ranks' hosts."""
    host = transport.host
    assert isinstance(host, GlooTransport), "processes are connected by gloo"
    return host


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
