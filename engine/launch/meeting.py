"""Meeting: ranks that a launcher has started find each other, and agree on who computes where."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

import torch
from torch.distributed import HashStore, PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from stagewright.engine.launch.environment import LOOPBACK, StartedRank, meeting_point
from stagewright.engine.launch.rounds import enter_round

_LOOPBACK_INTERFACES: Final = ("lo", "lo0")
_CPU: Final = "cpu"


@dataclass(frozen=True)
class Meeting:
    """What ranks know once they have met.

    Args:
        store: connects them.
        device: where this one's tensors live.
        num_local_ranks: ranks on this machine.
        backend: nccl where every rank has a GPU of its own, else gloo.
    """

    store: Store
    device: torch.device
    num_local_ranks: int
    backend: str


def meet(started: StartedRank) -> Meeting:
    """Meet the other ranks where rank 0 runs; every rank calls this alike.

    Raises:
        ValueError: nothing says where that is.
    """
    address, port = meeting_point(started)
    if address in (LOOPBACK, "localhost") or started.num_local_ranks == started.num_ranks:
        use_loopback()
    store = _store(started, address, port)
    hosts = _told(store, "host", started, socket.gethostname())
    neighbours = [rank for rank, host in enumerate(hosts) if host == hosts[started.rank]]
    local_rank = neighbours.index(started.rank) if started.local_rank is None else started.local_rank
    device = device_of(local_rank)
    devices = _told(store, "device", started, _identity(device))
    return Meeting(store, device, started.num_local_ranks or len(neighbours), backend_for(devices))


def use_loopback() -> None:
    """Let gloo connect ranks of this machine without asking what the machine's name resolves to."""
    names = [name for _, name in socket.if_nameindex() if name in _LOOPBACK_INTERFACES]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


def device_of(local_rank: int) -> torch.device:
    """The GPU of that number, shared where there are fewer GPUs than ranks; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device(_CPU)
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def backend_for(devices: Sequence[str]) -> str:
    """What connects ranks with these devices: nccl refuses two ranks on one GPU, and knows no CPU."""
    return "nccl" if _CPU not in devices and len(set(devices)) == len(devices) else "gloo"


def _identity(device: torch.device) -> str:
    """Tells a GPU from all others anywhere: its number may be another one for each process that sees it."""
    return _CPU if device.type == _CPU else str(torch.cuda.get_device_properties(device).uuid)


def _store(started: StartedRank, address: str, port: int) -> Store:
    """Where all ranks may leave notes for each other."""
    if started.num_ranks == 1:
        return HashStore()
    host = f"[{address}]" if ":" in address else quote(address)
    try:
        store, _, _ = next(rendezvous(f"tcp://{host}:{port}", started.rank, started.num_ranks))
    except Exception as error:
        error.add_note(
            f"rank {started.rank} of the {started.num_ranks} that {started.launcher.name} has started would meet the "
            f"others at {address}, port {port}: rank 0 must run there, and the port be free; MASTER_ADDR and "
            "MASTER_PORT name others"
        )
        raise
    return enter_round(PrefixStore("stagewright", store), started.rank, started.num_ranks)


def _told(store: Store, what: str, started: StartedRank, text: str) -> list[str]:
    """What every rank says, in the order of ranks; all of them call this alike."""
    store.set(f"{what} of rank {started.rank}", text)
    return [store.get(f"{what} of rank {rank}").decode() for rank in range(started.num_ranks)]
