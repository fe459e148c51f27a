"""Hub: what ranks that are threads of one process share: messages, the baton, and word of who has failed or left."""

import threading
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Final, TypeAlias

from stagewright.engine.control.ends import Batches, find_conflict
from stagewright.engine.control.progress import Progress
from stagewright.engine.control.silence import Answer, judge
from stagewright.engine.errors import PeerError
from stagewright.engine.value import Packed

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
