"""A double of NCCL's communicators for thread ranks, with NCCL's rules and none of its patience.

What NCCL leaves undefined, or answers with a hang, raises here:

* A communicator knows no tags: the k-th operation of one end meets the k-th of the other, which must be its opposite.
* A receive has exactly the size of its send.
* Sends and receives meet: neither is done before both are there (rendezvous), and an operation waits for all that
  were queued before it.
* Only one kernel of a communicator runs at a time.
* Communicators are made by all ranks in one order.

As on a GPU, an operation is only queued by the host, and reads and writes its memory when it runs: a sender that
overwrites what it has sent too early spoils it.
"""

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from torch import Tensor

from stagewright.engine.transport.contract import Line
from stagewright.engine.transport.device import DeviceTransport
from stagewright.engine.transport.threads import Hub, ThreadTransport

PATIENCE_SECONDS = 60.0


class MisuseError(AssertionError):
    """What would hang, crash or spoil data with NCCL."""


class Operation:
    """A send or receive in a communicator's queue; also its ticket."""

    def __init__(self, wire: "Wire", kind: str, data: Tensor) -> None:
        self.kind = kind
        self.data: Tensor | None = data
        self.done = False
        self._wire = wire

    def wait(self) -> None:
        """Block until it is done, where a GPU would let its stream wait."""
        self._wire.wait_for(self)

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self.done


class Wire:
    """What connects the two ends of one communicator."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.name = name
        self._hub = hub
        self._changed = threading.Condition()
        self._queues: dict[int, deque[Operation]] = {}
        self._misuse: str | None = None
        self._running = False

    def queue(self, rank: int, kind: str, data: Tensor) -> Operation:
        """Put an operation behind those of this end, and run what has met."""
        operation = Operation(self, kind, data)
        with self._changed:
            self._queues.setdefault(rank, deque()).append(operation)
            while len(self._queues) == 2 and all(self._queues.values()):
                one, other = (queue[0] for queue in self._queues.values())
                self.run(one, other)
                for queue in self._queues.values():
                    queue.popleft()
            self._changed.notify_all()
        return operation

    def run(self, one: Operation, other: Operation) -> None:
        """The kernel of a send and a receive that have met."""
        if self._running:
            self._fail("two kernels of one communicator run at the same time")
        self._running = True
        try:
            if {one.kind, other.kind} != {"send", "receive"}:
                self._fail(f"a {one.kind} meets a {other.kind}")
            send, receive = (one, other) if one.kind == "send" else (other, one)
            assert send.data is not None
            assert receive.data is not None
            if send.data.numel() != receive.data.numel():
                self._fail(f"a send of {send.data.numel()} bytes meets a receive of {receive.data.numel()}")
            receive.data.copy_(send.data)
            for operation in (one, other):
                operation.done = True
                operation.data = None  # memory is held until the operation is done, and no longer
        finally:
            self._running = False

    def wait_for(self, operation: Operation) -> None:
        """Block until an operation is done, another rank has failed, or nothing has happened for too long."""
        deadline = monotonic() + PATIENCE_SECONDS
        with self._changed:
            while not operation.done:
                if self._misuse is not None:
                    raise MisuseError(self._misuse)
                self._hub.check()
                if monotonic() > deadline:
                    self._fail(f"a {operation.kind} is never met")
                self._changed.wait(0.05)  # the hub cannot wake this one

    def _fail(self, rule: str) -> None:
        self._misuse = f"{self.name}: {rule}"
        with self._changed:
            self._changed.notify_all()
        raise MisuseError(self._misuse)


class End:
    """One end of a communicator; only one thread may use it at a time.

    Args:
        wire: to the other end.
        rank: this end.
    """

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire = wire
        self._rank = rank
        self._in_use = threading.Lock()

    def send(self, data: Tensor) -> Operation:
        """Queue a send."""
        return self._queue("send", data)

    def receive(self, data: Tensor) -> Operation:
        """Queue a receive."""
        return self._queue("receive", data)

    def _queue(self, kind: str, data: Tensor) -> Operation:
        if not data.is_contiguous():
            raise MisuseError(f"{self._wire.name}: a {kind} of memory with gaps")
        if not self._in_use.acquire(blocking=False):
            raise MisuseError(f"{self._wire.name}: two threads use one end at the same time")
        try:
            return self._wire.queue(self._rank, kind, data)
        finally:
            self._in_use.release()


class Switchboard:
    """Makes the communicators of all ranks.

    Args:
        hub: of the thread ranks.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._lock = threading.Lock()
        self._made: list[tuple[Line, Wire]] = []

    def connector(self, rank: int) -> Callable[[Line], End | None]:
        """What makes the communicators of one rank."""
        return Connector(self, rank)

    def wire(self, index: int, line: Line) -> Wire:
        """The index-th communicator that a rank asks for."""
        with self._lock:
            if index == len(self._made):
                source, destination, kind = line
                self._made.append((line, Wire(self._hub, f"{kind}s from rank {source} to rank {destination}")))
            expected, wire = self._made[index]
        if line != expected:
            raise MisuseError(f"communicator {index} is {line} on one rank and {expected} on another")
        return wire


class Connector:
    """Makes the communicators of one rank, in the order that all ranks share."""

    def __init__(self, board: Switchboard, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._num_made = 0

    def __call__(self, line: Line) -> End | None:
        """The end of a line that is here, None where there is none."""
        wire = self._board.wire(self._num_made, line)
        self._num_made += 1
        return End(wire, self._rank) if self._rank in line[:2] else None


def transports_on_double(hub: Hub) -> list[DeviceTransport]:
    """Every rank's transport over doubled communicators, with the hub in the place of the hosts."""
    board = Switchboard(hub)
    hosts = [ThreadTransport(hub, rank) for rank in range(hub.num_ranks)]
    return [DeviceTransport(host, board.connector(host.rank), host.device) for host in hosts]
