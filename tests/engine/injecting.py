"""The one place that every collective and every message between ranks goes through, where a test can do harm to it.

An InjectingTransport stands between a pipeline and any transport. Before each call it asks a Disturber, which may take
its time, or fail; one that holds messages back lets those of different channels overtake each other. Sums over
replicas go through an InjectingGroup, which comes with the transport.
"""

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from stagewright.engine.launch.threads import run_threads
from stagewright.engine.transport.contract import Channel, Line, Receipt, Session, Transport
from stagewright.engine.transport.group import Divisible, Group, Sum
from stagewright.engine.transport.hub import Hub
from stagewright.engine.transport.threads import ThreadTransport
from stagewright.engine.value import Packed

Kind: TypeAlias = Literal["open", "begin", "send", "post", "wait", "end", "gather", "start sum", "wait for sum"]


@dataclass(frozen=True)
class Call:
    """One call of a transport.

    Args:
        kind: which method.
        index: so many of that kind were before it on this rank.
        line: the channel, where there is one.
    """

    kind: Kind
    index: int
    line: Line | None = None


class Disturber:
    """Does nothing; what others do to the calls of one rank."""

    holds = False  # whether sends and posts wait until the rank itself would

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def before(self, kind: Kind, line: Line | None = None) -> None:
        """A call is about to be made."""
        call = Call(kind, sum(call.kind == kind for call in self.calls), line)
        self.calls.append(call)
        self.disturb(call)

    def disturb(self, call: Call) -> None:
        """Sleep, or raise."""

    def order(self, lines: list[Line]) -> list[Line]:
        """In which order the channels are served whose messages were held back."""
        return lines


class Sleeper(Disturber):
    """Sleeps before some calls.

    Args:
        seed: of what is random about it.
        most: so many seconds at most.
        share: of the calls.
    """

    def __init__(self, seed: object, most: float = 0.002, share: float = 0.3) -> None:
        super().__init__()
        self.chosen = random.Random(str(seed))
        self._most, self._share = most, share

    def disturb(self, call: Call) -> None:
        if self.chosen.random() < self._share:
            time.sleep(self.chosen.random() * self._most)


class Shuffler(Sleeper):
    """Sleeps, and lets messages of one channel overtake those of others."""

    holds = True

    def order(self, lines: list[Line]) -> list[Line]:
        return self.chosen.sample(lines, len(lines))


class Injected(Exception):  # noqa: N818  # it is what the test has asked for
    """A failure that was asked for."""


class Failure(Disturber):
    """Fails at one call.

    Args:
        kind, index: that one.
    """

    def __init__(self, kind: Kind, index: int) -> None:
        super().__init__()
        self._kind, self._index = kind, index

    def disturb(self, call: Call) -> None:
        if (call.kind, call.index) == (self._kind, self._index):
            raise Injected(f"{call.kind} {call.index}")


class InjectingTransport:
    """Any transport, behind a disturber.

    Args:
        inner: the transport.
        disturber: of this rank.
    """

    def __init__(self, inner: Transport, disturber: Disturber) -> None:
        self._inner, self._disturber = inner, disturber
        self._posts: dict[Line, list[Callable[[], None]]] = {}
        self._sends: dict[Line, list[Callable[[], None]]] = {}
        self._host = self if inner.host is inner else InjectingTransport(inner.host, disturber)

    def __getattr__(self, name: str) -> Any:
        """What only some transports have."""
        return getattr(self._inner, name)

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def num_ranks(self) -> int:
        return self._inner.num_ranks

    @property
    def device(self) -> torch.device:
        return self._inner.device

    @property
    def baton(self) -> AbstractContextManager[object]:
        return self._inner.baton

    @property
    def host(self) -> Transport:
        return self._host

    def open(self, channels: Sequence[Channel]) -> None:
        self.before("open")
        self._inner.open(channels)

    def begin(self, session: Session) -> None:
        self.before("begin")
        self._inner.begin(session)

    def send(self, channel: Channel, packed: Packed, stage: int, microbatch: int) -> None:
        self._disturber.before("send", channel.line)
        if not self._disturber.holds:
            self._inner.send(channel, packed, stage, microbatch)
            return
        copy = Packed(packed.layout, [tensor.detach().clone() for tensor in packed.tensors])
        held = self._sends.setdefault(channel.line, [])
        held.append(lambda: self._inner.send(channel, copy, stage, microbatch))

    def post(self, channel: Channel, stage: int, microbatch: int) -> Receipt:
        self._disturber.before("post", channel.line)
        receipt = _InjectedReceipt(self, channel, stage, microbatch)
        if self._disturber.holds:
            self._posts.setdefault(channel.line, []).append(receipt.post)
        else:
            receipt.post()
        return receipt

    def end(self) -> None:
        self.before("end")
        self._inner.end()

    def gather(self, data: bytes) -> list[bytes]:
        self.before("gather")
        return self._inner.gather(data)

    def abort(self, reason: str) -> None:
        self._posts.clear()
        self._sends.clear()
        self._inner.abort(reason)

    def close(self) -> None:
        self.release()
        self._inner.close()

    def before(self, kind: Kind, line: Line | None = None) -> None:
        """A call is about to be made for which this rank may have to wait: nothing is held back any longer."""
        self.release()
        self._disturber.before(kind, line)

    def release(self) -> None:
        """Let go what was held back."""
        for held in (self._posts, self._sends):
            for line in self._disturber.order(list(held)):
                for action in held.pop(line):
                    action()

    def post_inner(self, channel: Channel, stage: int, microbatch: int) -> Receipt:
        """Really post."""
        return self._inner.post(channel, stage, microbatch)


class DivisibleTransport(InjectingTransport):
    """A transport of which meshes can be made, behind a disturber."""

    def mesh(self, rows: Sequence[int], column: Sequence[int]) -> tuple[Transport, Group]:
        assert isinstance(self._inner, Divisible)
        inner, group = self._inner.mesh(rows, column)
        transport = InjectingTransport(inner, self._disturber)
        return transport, InjectingGroup(group, transport)


class _InjectedReceipt:
    def __init__(self, transport: InjectingTransport, channel: Channel, stage: int, microbatch: int) -> None:
        self._transport, self._channel, self._stage, self._microbatch = transport, channel, stage, microbatch
        self._inner: Receipt | None = None

    def post(self) -> None:
        self._inner = self._transport.post_inner(self._channel, self._stage, self._microbatch)

    def wait(self) -> Packed:
        self._transport.before("wait", self._channel.line)
        assert self._inner is not None
        return self._inner.wait()


class InjectingGroup:
    """The same rank of all replicas, behind a disturber.

    Args:
        inner: the group.
        transport: of this rank.
    """

    def __init__(self, inner: Group, transport: InjectingTransport) -> None:
        self._inner, self._transport = inner, transport

    def __getattr__(self, name: str) -> Any:
        """What only some groups have."""
        return getattr(self._inner, name)

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def device(self) -> torch.device:
        return self._inner.device

    def start_sum(self, tensor: Tensor) -> Sum:
        self._transport.before("start sum")
        return _InjectedSum(self._inner.start_sum(tensor), self._transport)

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)


class _InjectedSum:
    def __init__(self, inner: Sum, transport: InjectingTransport) -> None:
        self._inner, self._transport = inner, transport

    def wait(self) -> Tensor:
        self._transport.before("wait for sum")
        return self._inner.wait()


def launch_disturbed(
    function: Callable[..., Any], disturbers: Sequence[Disturber], args: tuple[Any, ...] = (), *, wakes: bool = False
) -> list[Any]:
    """Run a function in a thread a rank, each behind its disturber.

    Args:
        function, args: as for ``launch_local``.
        disturbers: one a rank.
        wakes: every rank that waits is woken again and again without cause.
    """
    hub = Hub(len(disturbers))
    transports = [DivisibleTransport(ThreadTransport(hub, rank), one) for rank, one in enumerate(disturbers)]
    if not wakes:
        return run_threads(function, hub, transports, args)
    with _waking(hub):
        return run_threads(function, hub, transports, args)


@contextmanager
def _waking(hub: Hub) -> Iterator[None]:
    done = threading.Event()
    waker = threading.Thread(target=_wake, args=(hub, done))
    waker.start()
    try:
        yield
    finally:
        done.set()
        waker.join()


def _wake(hub: Hub, done: threading.Event) -> None:
    while not done.wait(0.0003):
        with hub._changed:
            hub._changed.notify_all()


@contextmanager
def interrupted(seconds: float = 0.002) -> Iterator[list[int]]:
    """A block in which a signal wakes this process from whatever it waits for, again and again; gives their number."""
    num_signals = [0]

    def note(number: int, frame: FrameType | None) -> None:
        num_signals[0] += 1

    previous = signal.signal(signal.SIGALRM, note)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield num_signals
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
