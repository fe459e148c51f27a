"""Threads: ranks as threads of one process, for tests and for looking around; messages are handed over in memory."""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from stagewright.engine.control.progress import Progress
from stagewright.engine.errors import returned
from stagewright.engine.transport.contract import OCCUPIED, Channel, Line, Receipt, Session, Transport
from stagewright.engine.transport.group import Sum
from stagewright.engine.transport.hub import Baton, Hub, Key
from stagewright.engine.value import Packed, pack


class _ThreadReceipt:
    __slots__ = ("_key", "_transport")

    def __init__(self, transport: "ThreadTransport", key: Key) -> None:
        self._transport, self._key = transport, key

    def wait(self) -> Packed:
        """Block until the message is there."""
        return self._transport.take(self._key)


class ThreadTransport:
    """One thread rank's connection to the others.

    Args:
        hub: shared by all ranks.
        rank: this rank.
        members: the ranks of the hub that are this transport's, in order; all of them where left out.
        name: tells it from other transports of the same ranks.
    """

    def __init__(self, hub: Hub, rank: int, members: Sequence[int] | None = None, name: str = "") -> None:
        self._hub = hub
        self.rank = rank
        self._members = tuple(range(hub.num_ranks)) if members is None else tuple(members)
        self.num_ranks = len(self._members)
        self.device = torch.device("cpu")
        self.baton: AbstractContextManager[object] = Baton(hub, self._members[rank])
        self.progress = Progress(rank)
        hub.watch(self._members[rank], self.progress)
        self._num_meshes = 0
        self._name = name
        self._num_messages: dict[Line, int] = {}
        self._num_awaited = 0
        self._num_gathers = 0

    @property
    def host(self) -> Transport:
        """This one."""
        return self

    def set_timeout(self, seconds: float) -> None:
        """For all ranks of the hub."""
        self._hub.set_timeout(seconds)

    def begin_batch(self) -> None:
        """Note it in the hub."""
        self._hub.begin_batch(self._members[self.rank], self._members)

    def drain(self) -> None:
        """Note it in the hub."""
        self._hub.drain(self._members[self.rank], self._members)

    def open(self, channels: Sequence[Channel]) -> None:
        """Nothing to make ready."""

    def begin(self, session: Session) -> None:
        """Nothing to prepare: messages are counted on and on.

        Raises:
            ValueError: another pipeline has something in flight here.
        """
        if self._num_awaited:
            raise ValueError(OCCUPIED)

    def send(self, channel: Channel, packed: Packed, stage: int, microbatch: int) -> None:
        """Hand over a copy, as a wire would: the receiver may write into it."""
        copy = Packed(packed.layout, [tensor.detach().clone() for tensor in packed.tensors])
        self._hub.put(self._next(channel), copy)

    def post(self, channel: Channel, stage: int, microbatch: int) -> Receipt:
        """Reserve the next message of a channel."""
        self._num_awaited += 1
        return _ThreadReceipt(self, self._next(channel))

    def take(self, key: Key) -> Packed:
        """Wait for a message that was posted."""
        packed = self._hub.take(key)
        self._num_awaited -= 1
        return packed

    def end(self) -> None:
        """Nothing is under way once it was handed over."""

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes."""
        self._num_gathers += 1
        return self._hub.gather(self._num_gathers, self._members[self.rank], data, self._members, self._name)

    def abort(self, reason: str) -> None:
        """Wake every rank that waits."""
        self._hub.fail(reason)

    def leave(self) -> None:
        """Wake every rank that waits for this one."""
        progress = self.progress
        reason = returned(progress.rank, progress.num_batches, progress.replica)
        self._hub.leave(self._members[self.rank], reason)

    def hear(self, pending: Collection[int], awaited: int | None) -> str | None:
        """What the hub knows."""
        members = self._members
        others = [members[rank] for rank in pending]
        return self._hub.hear(members[self.rank], others, None if awaited is None else members[awaited])

    def close(self) -> None:
        """Nothing to release."""

    def mesh(self, rows: Sequence[int], column: Sequence[int]) -> tuple["ThreadTransport", "ThreadGroup"]:
        """Connections among some of the ranks; every rank calls this alike.

        Args:
            rows: the ranks of this one's replica of a pipeline.
            column: the same rank of all replicas.
        """
        self._num_meshes += 1
        name = f"{self._name} mesh {self._num_meshes}"
        own = self._members[self.rank]
        ranks, replicas = ([self._members[rank] for rank in part] for part in (rows, column))
        transport = ThreadTransport(self._hub, ranks.index(own), ranks, name)
        return transport, ThreadGroup(self._hub, replicas.index(own), replicas, name)

    def _next(self, channel: Channel) -> Key:
        index = self._num_messages.get(channel.line, 0)
        self._num_messages[channel.line] = index + 1
        source, destination = self._members[channel.source], self._members[channel.destination]
        return source, destination, f"{self._name} {channel.kind}", index


class ThreadGroup:
    """Sums over replicas; every rank adds them up for itself, in the order of replicas.

    Args:
        hub: shared by all ranks.
        rank: this replica.
        members: the ranks of the hub that are the same rank of each replica.
        name: tells it from other groups of the same ranks.
    """

    def __init__(self, hub: Hub, rank: int, members: Sequence[int], name: str = "") -> None:
        self.rank = rank
        self.size = len(members)
        self.device = torch.device("cpu")
        self._hub = hub
        self._members = tuple(members)
        self._name = name
        self._num_sums = 0

    def start_sum(self, tensor: Tensor) -> Sum:
        """Hand a copy to every other replica."""
        own, index = self._members[self.rank], self._num_sums
        self._num_sums += 1
        copy = pack(tensor.detach().clone(), "a replica")
        others = [other for other in self._members if other != own]
        for other in others:
            self._hub.put((own, other, f"{self._name} sum", index), copy)
        keys = {other: (other, own, f"{self._name} sum", index) for other in others}
        return _ThreadSum(self._hub, tensor, [keys.get(member) for member in self._members])

    def abort(self, reason: str) -> None:
        """Wake every rank that waits."""
        self._hub.fail(reason)


class _ThreadSum:
    __slots__ = ("_hub", "_own", "_sources")

    def __init__(self, hub: Hub, own: Tensor, sources: Sequence[Key | None]) -> None:
        self._hub, self._own, self._sources = hub, own, sources

    def wait(self) -> Tensor:
        """Block until every replica's part is there, and add them up in new memory."""
        first, *others = [self._own if key is None else self._hub.take(key).tensors[0] for key in self._sources]
        total = first.detach().clone()
        for other in others:
            total += other
        return total
