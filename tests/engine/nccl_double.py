"""A double of NCCL's communicators for thread ranks, with NCCL's rules and none of its patience.

What NCCL leaves undefined, or answers with a hang, raises here:

* A communicator knows no tags: the k-th operation of one end meets the k-th of the others, which must go with it: a
  receive with a send, a sum with sums.
* A receive has exactly the size of its send; what is summed has one size and type on all ranks.
* Operations meet: none is done before all ends are there (rendezvous), and one waits for all that were queued before
  it.
* Only one kernel of a communicator runs at a time.
* Communicators are made by all ranks in one order, those of all replicas of a pipeline too.

As on a GPU, an operation is only queued by the host, and reads and writes its memory when it runs: a sender that
overwrites what it has sent too early spoils it. Nor does an operation know of ranks that have failed or returned: until
its own end is aborted it waits for them.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import HashStore, ReduceOp

from stagewright.engine.transport.collective import CollectiveGroup
from stagewright.engine.transport.contract import Line
from stagewright.engine.transport.device import DeviceTransport
from stagewright.engine.transport.group import Group
from stagewright.engine.transport.hub import Hub
from stagewright.engine.transport.threads import ThreadTransport

PATIENCE_SECONDS = 60.0
# How often ranks look for news of each other.
LOOK_SECONDS = 0.02
# What NCCL adds up.
SUMMED = (
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


class MisuseError(AssertionError):
    """What would hang, crash or spoil data with NCCL."""


class Operation:
    """One of a communicator's queue; also its ticket."""

    def __init__(self, wire: "Wire", rank: int, kind: str, data: Tensor) -> None:
        self.kind = kind
        self.rank = rank
        self.data: Tensor | None = data
        self.done = False
        self._wire = wire

    def wait(self) -> None:
        """Block until it is done, where a GPU would let its stream wait."""
        self._wire.wait_for(self)

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self.done

    def finish(self) -> None:
        """It is done; memory is held until then, and no longer."""
        self.done = True
        self.data = None


class Wire(ABC):
    """What connects the ends of one communicator.

    Args:
        name: for messages.
        num_ends: ranks that it connects.
    """

    def __init__(self, name: str, num_ends: int) -> None:
        self.name = name
        self._num_ends = num_ends
        self._changed = threading.Condition()
        self._queues: dict[int, deque[Operation]] = {}
        self._aborted: set[int] = set()
        self._misuse: str | None = None
        self._running = False

    @abstractmethod
    def kernel(self, operations: Sequence[Operation]) -> None:
        """What operations do that have met, in the order of ranks."""

    def queue(self, rank: int, kind: str, data: Tensor) -> Operation:
        """Put an operation behind those of this end, and run what has met."""
        operation = Operation(self, rank, kind, data)
        with self._changed:
            if rank in self._aborted:
                raise RuntimeError(f"{self.name}: the communicator was aborted")
            self._queues.setdefault(rank, deque()).append(operation)
            while len(self._queues) == self._num_ends and all(self._queues.values()):
                self.run(*(queue[0] for _, queue in sorted(self._queues.items())))
                for queue in self._queues.values():
                    queue.popleft()
            self._changed.notify_all()
        return operation

    def run(self, *operations: Operation) -> None:
        """Run the kernel of operations that have met."""
        if self._running:
            self.fail("two kernels of one communicator run at the same time")
        self._running = True
        try:
            self.kernel(operations)
            for operation in operations:
                operation.finish()
        finally:
            self._running = False

    def wait_for(self, operation: Operation) -> None:
        """Block until an operation is done, its end was aborted, or nothing has happened for too long."""
        deadline = monotonic() + PATIENCE_SECONDS
        with self._changed:
            while not operation.done:
                if self._misuse is not None:
                    raise MisuseError(self._misuse)
                if not self._changed.wait(max(0.0, deadline - monotonic())) and not operation.done:
                    self.fail(f"a {operation.kind} is never met")

    def abort(self, rank: int) -> None:
        """End what one end has in the queue: it counts as done, with whatever is in its memory."""
        with self._changed:
            self._aborted.add(rank)
            for operation in self._queues.pop(rank, ()):
                operation.finish()
            self._changed.notify_all()

    def fail(self, rule: str) -> None:
        """A rule was broken, which both ends learn."""
        self._misuse = f"{self.name}: {rule}"
        with self._changed:
            self._changed.notify_all()
        raise MisuseError(self._misuse)


class PairWire(Wire):
    """Between two ranks that send and receive."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 2)

    def kernel(self, operations: Sequence[Operation]) -> None:
        """A message of exact size."""
        one, other = operations
        if {one.kind, other.kind} != {"send", "receive"}:
            self.fail(f"a {one.kind} meets a {other.kind}")
        send, receive = (one, other) if one.kind == "send" else (other, one)
        assert send.data is not None
        assert receive.data is not None
        if send.data.numel() != receive.data.numel():
            self.fail(f"a send of {send.data.numel()} bytes meets a receive of {receive.data.numel()}")
        receive.data.copy_(send.data)


class SumWire(Wire):
    """Between all replicas of a rank, which add up."""

    def kernel(self, operations: Sequence[Operation]) -> None:
        """Give all of them the sum, in place."""
        parts = [operation.data for operation in operations if operation.data is not None]
        sizes = {(part.numel(), part.dtype) for part in parts}
        if len(sizes) > 1:
            self.fail(f"a sum of {' and of '.join(sorted(f'{numel} {dtype}' for numel, dtype in sizes))}")
        if parts[0].dtype not in SUMMED:
            self.fail(f"a sum of {parts[0].dtype}, which NCCL does not add up")
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        for part in parts:
            part.copy_(total)


class End:
    """One end of a communicator; only one thread may use it at a time.

    Args:
        wire: to the other ends.
        rank: this end.
    """

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire = wire
        self._rank = rank
        self._in_use = threading.Lock()

    def send(self, data: Tensor) -> Operation:
        """Queue a send."""
        return self.queue("send", data)

    def receive(self, data: Tensor) -> Operation:
        """Queue a receive."""
        return self.queue("receive", data)

    def abort(self) -> None:
        """End what is queued here."""
        self._wire.abort(self._rank)

    def queue(self, kind: str, data: Tensor) -> Operation:
        """Queue anything."""
        if not data.is_contiguous():
            raise MisuseError(f"{self._wire.name}: a {kind} of memory with gaps")
        if not self._in_use.acquire(blocking=False):
            raise MisuseError(f"{self._wire.name}: two threads use one end at the same time")
        try:
            return self._wire.queue(self._rank, kind, data)
        finally:
            self._in_use.release()


class DoubledGroup:
    """A process group of the same rank of all replicas, as far as a ``CollectiveGroup`` needs one.

    Args:
        end: of the communicator, None for a single replica.
        store: of all of them.
        rank, size: this replica, of how many.
    """

    def __init__(self, end: End | None, store: HashStore, rank: int, size: int) -> None:
        self._end = end
        self._store = store
        self._rank, self._size = rank, size

    def rank(self) -> int:
        """This replica."""
        return self._rank

    def size(self) -> int:
        """Replicas."""
        return self._size

    def get_group_store(self) -> HashStore:
        """Where they leave notes."""
        return self._store

    def allreduce(self, tensors: list[Tensor], options: Any) -> Operation:
        """Queue a sum."""
        (tensor,) = tensors
        assert self._end is not None
        assert options.reduceOp == ReduceOp.SUM
        return self._end.queue("sum", tensor)

    def abort(self) -> None:
        """End what is queued here."""
        if self._end is not None:
            self._end.abort()


# What a communicator is for: the line of a pipeline, by the name of the mesh, or the sums of one.
Purpose: TypeAlias = tuple[str, Line | None]


class Switchboard:
    """Connects the ranks of a hub."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._purposes: list[Purpose] = []
        self._wires: dict[tuple[int, Sequence[int]], tuple[Wire, HashStore]] = {}

    def wire(self, index: int, purpose: Purpose, members: Sequence[int]) -> tuple[Wire, HashStore]:
        """The index-th communicator that a rank asks for, among some ranks, and a store of theirs."""
        with self._lock:
            if index == len(self._purposes):
                self._purposes.append(purpose)
            if purpose != self._purposes[index]:
                raise MisuseError(
                    f"communicator {index} is {purpose} on one rank and {self._purposes[index]} on another"
                )
            if (index, members) not in self._wires:
                self._wires[index, members] = self._made(purpose, members), HashStore()
            return self._wires[index, members]

    def _made(self, purpose: Purpose, members: Sequence[int]) -> Wire:
        mesh, line = purpose
        if line is None:
            return SumWire(f"sums of ranks {members}{mesh}", len(members))
        source, destination, kind = line
        return PairWire(f"{kind}s from rank {members[source]} to rank {members[destination]}{mesh}")


class Desk:
    """Makes the communicators of one rank, in the order that all ranks share.

    Args:
        board: connects it.
        rank: whose it is.
    """

    def __init__(self, board: Switchboard, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._num_made = 0

    def connect(self, members: Sequence[int], mesh: str, line: Line) -> End | None:
        """This rank's end of a line in its pipeline, None where it has none; made in all replicas at once."""
        wire, _ = self._next((mesh, line), members)
        return End(wire, self._rank) if self._rank in (members[line[0]], members[line[1]]) else None

    def group(self, members: Sequence[int], mesh: str) -> DoubledGroup:
        """The group of some ranks."""
        wire, store = self._next((mesh, None), members)
        end = End(wire, self._rank) if len(members) > 1 else None
        return DoubledGroup(end, store, members.index(self._rank), len(members))

    def _next(self, purpose: Purpose, members: Sequence[int]) -> tuple[Wire, HashStore]:
        index, self._num_made = self._num_made, self._num_made + 1
        return self._board.wire(index, purpose, members)


class DoubledTransport(DeviceTransport):
    """One rank's transport over doubled communicators, with its hub in the place of the hosts.

    Args:
        hub: shared by all ranks.
        desk: of this rank.
        host: its connection over the hub.
        members: the ranks of the hub that are this transport's.
        mesh: tells it from other transports of the same ranks.
    """

    def __init__(self, hub: Hub, desk: Desk, host: ThreadTransport, members: Sequence[int], mesh: str = "") -> None:
        connect: Callable[[Line], End | None] = partial(desk.connect, members, mesh)
        super().__init__(host, connect, host.device, period=LOOK_SECONDS)
        self._hub, self._desk, self._threads = hub, desk, host
        self._members, self._mesh = members, mesh
        self._num_meshes = 0

    def mesh(self, rows: Sequence[int], column: Sequence[int]) -> tuple["DoubledTransport", Group]:
        """Connections among some of the ranks; every rank calls this alike."""
        self._num_meshes += 1
        mesh = f"{self._mesh} of mesh {self._num_meshes}"
        host, _ = self._threads.mesh(rows, column)
        ranks, replicas = (tuple(self._members[rank] for rank in part) for part in (rows, column))
        process_group: Any = self._desk.group(replicas, mesh)
        group = CollectiveGroup(process_group, self.device, on_host=False, period=LOOK_SECONDS)
        return DoubledTransport(self._hub, self._desk, host, ranks, mesh), group


def transport_on_double(
    hub: Hub, board: Switchboard, rank: int, make_host: Callable[[Hub, int], ThreadTransport] = ThreadTransport
) -> DoubledTransport:
    """One rank's transport, over the switchboard of all."""
    return DoubledTransport(hub, Desk(board, rank), make_host(hub, rank), tuple(range(hub.num_ranks)))


def transports_on_double(
    hub: Hub, make_host: Callable[[Hub, int], ThreadTransport] = ThreadTransport
) -> list[DoubledTransport]:
    """Every rank's transport over doubled communicators."""
    board = Switchboard()
    return [transport_on_double(hub, board, rank, make_host) for rank in range(hub.num_ranks)]
