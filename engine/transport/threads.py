"""Threads: ranks as threads of one process, for tests and for looking around; messages are handed over in memory."""

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from time import monotonic
from typing import Final, TypeAlias

import torch
from torch import Tensor

from stagewright.engine.ends import Batches, find_conflict
from stagewright.engine.errors import PeerError, returned
from stagewright.engine.progress import Progress
from stagewright.engine.silence import Answer, judge
from stagewright.engine.transport.contract import OCCUPIED, Channel, Line, Receipt, Session, Transport
from stagewright.engine.transport.group import Sum
from stagewright.engine.value import Packed, pack

# Seconds without any message after which a rank that waits finds out who keeps it waiting.
DEFAULT_TIMEOUT: Final = 1800.0
# How often a rank that waits to compute looks whether another has failed.
_LOOK_SECONDS: Final = 0.5

# source and destination in the hub, what it is, index
Key: TypeAlias = tuple[int, int, str, int]


class Hub:
    """What all thread ranks share, those of several replicas of a pipeline too.

    Args:
        num_ranks: ranks that will meet here.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        # torch's random generator belongs to the process: whoever computes holds the baton.
        self._lock = threading.RLock()
        self._holder = 0
        self._wanting: set[int] = set()  # ranks that wait for the baton
        self._changed = threading.Condition()
        self._messages: dict[Key, Packed] = {}
        self._gathered: dict[tuple[Sequence[int], str, int], dict[int, bytes]] = {}
        self._left: dict[int, str] = {}
        self._failure: str | None = None
        self._waiting: dict[int, int] = {}  # rank -> one that it waits for
        # rank -> one that its device waits for, since when, and where all ranks were then
        self._on_device: dict[int, tuple[int, float, Mapping[int, tuple[int, ...]]]] = {}
        self._progress: dict[int, Progress] = {}
        self._batches: dict[int, Batches] = {}
        self.timeout = DEFAULT_TIMEOUT
        self.stuck: set[int] = set()  # ranks that nobody waits for any more

    def acquire(self, rank: int) -> None:
        """Wait for the baton.

        Raises:
            PeerError: the rank that has it does not go on.
        """
        if not self._lock.acquire(blocking=False):
            self._wanting.add(rank)
            try:
                self._await_baton(rank)
            finally:
                self._wanting.discard(rank)
        self._holder = rank

    def _await_baton(self, rank: int) -> None:
        before, since = self._snapshots(), monotonic()
        while not self._lock.acquire(timeout=min(self.timeout, _LOOK_SECONDS)):
            with self._changed:
                self.check()
                if monotonic() - since > self.timeout:
                    self._judge(rank, before)
                    self.check()
                    before, since = self._snapshots(), monotonic()

    def release(self) -> None:
        """Hand the baton on."""
        self._lock.release()

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
                self._wait(key[1], key[0])
            return self._messages.pop(key)

    def gather(
        self, turn: int, rank: int, data: bytes, members: Sequence[int] | None = None, name: str = ""
    ) -> list[bytes]:
        """Wait for the bytes that the members of a transport, by default all ranks, give in this turn of theirs."""
        members = tuple(range(self.num_ranks) if members is None else members)
        with self._changed:
            of_turn = self._gathered.setdefault((members, name, turn), {})
            of_turn[rank] = data
            self._changed.notify_all()
            while len(of_turn) < len(members):
                missing = [other for other in members if other not in of_turn]
                self.check(missing)
                self._wait(rank, missing[0])
            self._gathered.pop(
                (members, name, turn - 1), None
            )  # everyone has read the turn before, or it would not be here
            return [of_turn[other] for other in members]

    def fail(self, reason: str) -> None:
        """Make every rank that waits, now or later, raise PeerError; the first reason counts."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def leave(self, rank: int, reason: str) -> None:
        """A rank's function has returned: whoever waits for it, now or later, raises PeerError."""
        with self._changed:
            self._left[rank] = reason
            self._changed.notify_all()

    def set_timeout(self, seconds: float) -> None:
        """From now on, for those that wait already too."""
        with self._changed:
            self.timeout = seconds
            self._changed.notify_all()

    def watch(self, rank: int, progress: Progress) -> None:
        """Where a rank writes what it does."""
        with self._changed:
            self._progress[rank] = progress
            self._batches[rank] = Batches()

    def begin_batch(self, rank: int, members: Sequence[int]) -> None:
        """A rank begins one more batch, where they follow each other without a flush."""
        with self._changed:
            self._batches[rank].num_begun += 1
            self._compare(members)

    def drain(self, rank: int, members: Sequence[int]) -> None:
        """A rank ends the batches in flight before it begins another."""
        with self._changed:
            batches = self._batches[rank]
            batches.ended.append(batches.num_begun)
            self._compare(members)

    @property
    def num_waiting(self) -> int:
        """Messages that nobody has picked up."""
        return len(self._messages)

    def check(self, awaited: Sequence[int] = ()) -> None:
        """Raise PeerError where a rank has failed, or one that something is awaited from has returned."""
        if self._failure is not None:
            raise PeerError(self._failure)
        gone = self._left.keys() & set(awaited)
        if gone:
            raise PeerError(self._left[min(gone)])

    def hear(self, rank: int, pending: Sequence[int], awaited: int | None) -> str | None:
        """Why nothing comes from some ranks any more, for one whose device waits."""
        with self._changed:
            self._look_at_device(rank, awaited)
            try:
                self.check(pending)
            except PeerError as error:
                return str(error) if pending else None
        return None

    def _look_at_device(self, rank: int, awaited: int | None) -> None:
        """As for a rank that waits here; it is given so much time after its last instruction."""
        if awaited is None:
            self._on_device.pop(rank, None)
            return
        now = monotonic()
        _, since, before = self._on_device.get(rank, (awaited, now, {}))
        if before.get(rank) != self._progress[rank].snapshot:
            since, before = now, {other: progress.snapshot for other, progress in self._progress.items()}
        self._on_device[rank] = awaited, since, before
        if now - since > self.timeout:
            del self._on_device[rank]
            self._waiting[rank] = awaited
            try:
                self._judge(rank, before)
            finally:
                del self._waiting[rank]

    def _awaited(self, rank: int) -> int | None:
        awaited, *_ = self._on_device.get(rank, (None,))
        return self._waiting.get(rank, awaited)

    def _wait(self, rank: int, awaited: int) -> None:
        """Sleep until something has changed; where nothing has for too long, find out who is at fault."""
        self._waiting[rank] = awaited
        before = self._snapshots()
        try:
            if not self._changed.wait(self.timeout):
                self._judge(rank, before)
        finally:
            del self._waiting[rank]

    def _snapshots(self) -> dict[int, tuple[int, ...]]:
        return {other: progress.snapshot for other, progress in self._progress.items()}

    def _judge(self, rank: int, before: Mapping[int, tuple[int, ...]]) -> None:
        present = {other: progress for other, progress in self._progress.items() if other not in self._left}
        answers = {
            other: Answer(
                progress.place,
                self._waiting.get(other, self._holder if other in self._wanting else None),
                self.timeout if progress.snapshot == before.get(other) else 0.0,
            )
            for other, progress in present.items()
        }
        verdict = judge(rank, answers, {}, self.timeout, {other: of.name for other, of in present.items()})
        if verdict is not None:
            self.stuck |= {other for other in verdict.ranks if answers[other].awaited is None}
            self.fail(verdict.reason)

    def _compare(self, members: Sequence[int]) -> None:
        names = {member: self._progress[member].name for member in members}
        conflict = find_conflict({member: self._batches[member] for member in members}, names)
        if conflict is not None:
            self.fail(conflict)


class Baton:
    """The baton as one rank sees it.

    Args:
        hub: where it is.
        rank: of the hub.
    """

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub, self._rank = hub, rank

    def __enter__(self) -> None:
        self._hub.acquire(self._rank)

    def __exit__(self, *_: object) -> None:
        self._hub.release()


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
