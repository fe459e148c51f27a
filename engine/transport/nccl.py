"""NCCL: communicators between GPUs, one for each channel, so that none ever waits behind another's traffic."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.engine.transport.communicator import Communicator, Ticket
from stagewright.engine.transport.contract import Line
from stagewright.engine.transport.device import DeviceTransport
from stagewright.engine.transport.gloo import GlooTransport


class NcclConnect:
    """Makes a group of two ranks for every line.

    A process group has one stream and, between two ranks, one communicator: both directions in one group, or two
    channels of a direction, would queue behind each other.

    Args:
        pipelines: for each pipeline, which have all the same channels, the global ranks of its ranks, in order.
        device: this rank's GPU.
    """

    def __init__(self, pipelines: Sequence[Sequence[int]], device: torch.device) -> None:
        self._pipelines = pipelines
        self._device = device

    def __call__(self, line: Line) -> Communicator | None:
        """The communicator of a line, warmed up: NCCL sets it up at its first use, with both ends waiting."""
        source, destination, _ = line
        own = dist.get_rank()
        made = [(ranks[source], ranks[destination]) for ranks in self._pipelines]
        groups = {ends: dist.new_group(list(ends), backend="nccl") for ends in made}  # all ranks make all groups
        ends = next((ends for ends in made if own in ends), None)
        if ends is None:
            return None
        group = groups[ends]
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

    def abort(self) -> None:
        """End what is in the queue, and the communicator with it."""
        self._group.abort()


def nccl_transport(device: torch.device, pipelines: Sequence[Sequence[int]] = ()) -> DeviceTransport:
    """Over the ranks of this one's pipeline, with a gloo group beside it from host to host.

    Args:
        device: this rank's GPU.
        pipelines: the global ranks of every pipeline; all ranks are one where left out.
    """
    pipelines = pipelines or [list(range(dist.get_world_size()))]
    hosts = {tuple(ranks): dist.new_group(list(ranks), backend="gloo") for ranks in pipelines}  # all make all
    host = next(group for ranks, group in hosts.items() if dist.get_rank() in ranks)
    return DeviceTransport(GlooTransport(host), NcclConnect(pipelines, device), device)
