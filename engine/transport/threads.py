"""Threads: ranks as threads of one process, for tests and for looking around; messages are handed over in memory."""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch

from stagewright.engine.errors import PeerError
from stagewright.engine.transport.contract import OCCUPIED, Channel, Kind, Line, Receipt, Session, Transport
from stagewright.engine.value import Packed

# source, destination, kind, index
Key: TypeAlias = tuple[int, int, Kind, int]


class Hub:
    """What the thread ranks of one pipeline share.

    Args:
        num_ranks: ranks that will meet here.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        # torch's random generator belongs to the process: whoever computes holds the baton.
        self.baton = threading.RLock()
        self._changed = threading.Condition()
        self._messages: dict[Key, Packed] = {}
        self._gathered: dict[int, dict[int, bytes]] = {}
        self._left: set[int] = set()
        self._failure: str | None = None

    def put(self, key: Key, packed: Packed) -> None:
        """Lay down a message."""
        with self._changed:
            self.check()
            self._messages[key] = packed
            self._changed.notify_all()

    def take(self, key: Key) -> Packed:
        """Wait for a message and pick it up."""
        with self._changed:
            while key not in self._messages:
                self.check(key[:1])
                self._changed.wait()
            return self._messages.pop(key)

    def gather(self, turn: int, rank: int, data: bytes) -> list[bytes]:
        """Wait for every rank's bytes of this turn."""
        with self._changed:
            of_turn = self._gathered.setdefault(turn, {})
            of_turn[rank] = data
            self._changed.notify_all()
            while len(of_turn) < self.num_ranks:
                self.check([other for other in range(self.num_ranks) if other not in of_turn])
                self._changed.wait()
            self._gathered.pop(turn - 1, None)  # everyone has read the turn before, or it would not be here
            return [of_turn[other] for other in range(self.num_ranks)]

    def fail(self, reason: str) -> None:
        """Make every rank that waits, now or later, raise PeerError; the first reason counts."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def leave(self, rank: int) -> None:
        """A rank's function has returned: whoever waits for it, now or later, raises PeerError."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    @property
    def num_waiting(self) -> int:
        """Messages that nobody has picked up."""
        return len(self._messages)

    def check(self, awaited: Sequence[int] = ()) -> None:
        """Raise PeerError where a rank has failed, or one that something is awaited from has returned."""
        if self._failure is not None:
            raise PeerError(self._failure)
        gone = self._left.intersection(awaited)
        if gone:
            raise PeerError(f"rank {min(gone)} has returned while another rank still waits for what it sends")


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
        hub: shared by all ranks of the pipeline.
        rank: this rank.
    """

    def __init__(self, hub: Hub, rank: int) -> None:
        self.rank = rank
        self.num_ranks = hub.num_ranks
        self.device = torch.device("cpu")
        self.baton: AbstractContextManager[object] = hub.baton
        self._hub = hub
        self._num_messages: dict[Line, int] = {}
        self._num_awaited = 0
        self._num_gathers = 0

    @property
    def host(self) -> Transport:
        """This one."""
        return self

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
        return self._hub.gather(self._num_gathers, self.rank, data)

    def abort(self, reason: str) -> None:
        """Wake every rank that waits."""
        self._hub.fail(reason)

    def close(self) -> None:
        """Nothing to release."""

    def _next(self, channel: Channel) -> Key:
        index = self._num_messages.get(channel.line, 0)
        self._num_messages[channel.line] = index + 1
        return (*channel.line, index)
