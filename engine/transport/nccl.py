"""NCCL: communicators between GPUs, one for each channel, so that none ever waits behind another's traffic."""

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.engine.transport.contract import Line
from stagewright.engine.transport.device import Communicator, DeviceTransport, Ticket
from stagewright.engine.transport.gloo import GlooTransport


class NcclConnect:
    """Makes a group of two ranks for every line.

    A process group has one stream and, between two ranks, one communicator: both directions in one group, or two
    channels of a direction, would queue behind each other.

    Args:
        ranks: the global ranks of the pipeline's ranks, in order.
        device: this rank's GPU.
    """

    def __init__(self, ranks: list[int], device: torch.device) -> None:
        self._ranks = ranks
        self._device = device

    def __call__(self, line: Line) -> Communicator | None:
        """The communicator of a line, warmed up: NCCL sets it up at its first use, with both ends waiting."""
        source, destination, _ = line
        ends = self._ranks[source], self._ranks[destination]
        group = dist.new_group(list(ends), backend="nccl")
        own = dist.get_rank()
        if own not in ends:
            return None
        # A group orders its ranks by itself, whatever order it was given them in.
        other = ends[1] if own == ends[0] else ends[0]
        communicator = NcclCommunicator(group, dist.get_group_rank(group, other))
        token = torch.zeros(1, dtype=torch.uint8, device=self._device)
        warm_up = communicator.send if own == ends[0] else communicator.receive
        warm_up(token).wait()
        return communicator


class NcclCommunicator:
    """One direction between two GPUs.

    A send or receive runs on the group's own stream, after what the current stream has been given so far; torch holds
    on to its tensor until ``wait`` has made the current stream wait for it, or it has been seen to be done.

    Args:
        group: of the two ranks.
        peer: the other one's place in it.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group = group
        self._peer = peer

    def send(self, data: Tensor) -> Ticket:
        """Queue a send."""
        work: Ticket = self._group.send([data], self._peer, 0)
        return work

    def receive(self, data: Tensor) -> Ticket:
        """Queue a receive."""
        work: Ticket = self._group.recv([data], self._peer, 0)
        return work


def nccl_transport(device: torch.device) -> DeviceTransport:
    """Over all ranks of the default process group, with a gloo group beside it from host to host."""
    host = dist.new_group(backend="gloo")
    connect = NcclConnect(list(range(dist.get_world_size())), device)
    return DeviceTransport(GlooTransport(host), connect, device)
