"""Listening: the thread of a control, which hears the other ranks and finds out why nothing comes from one of them.

What it hears, and what follows, stands in ``control``.
"""

import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Final, Protocol

from stagewright.engine.control.ends import Batches, find_conflict
from stagewright.engine.control.links import Link
from stagewright.engine.control.messages import Kind, from_text, to_text
from stagewright.engine.control.progress import Place, Progress
from stagewright.engine.control.silence import Answer, judge
from stagewright.engine.errors import returned

DEFAULT_TIMEOUT: Final = 1800.0

# How long a rank may take to say what it does; how long one that has left may still be waited for, because of what is
# on its way.
_ANSWER_SECONDS: Final = 4.0
_LAST_WORDS_SECONDS: Final = 2.0
# From the news of a failure on: until gloo is broken off under a rank that waits in it, or in whatever else.
_WAITING_SECONDS: Final = 1.0
_BUSY_SECONDS: Final = 5.0
# Between two looks: while there is something to look for; where ranks are on other hosts; at most.
_SOON, _NOW_AND_THEN, _SELDOM = 0.2, 1.0, 5.0


class Sleeper(Protocol):
    """What this rank may be blocked in."""

    def hang_up(self) -> None:
        """Let nobody wait for a neighbour any more."""
        ...

    def break_off(self) -> None:
        """Let nobody wait in gloo any more."""
        ...


class Watch:
    """What the thread of a control does.

    Args:
        rank: this one.
        links: to the others.
        progress: of this rank.
        sleeper: refers to what is woken.
    """

    def __init__(
        self, rank: int, links: Sequence[Link], progress: Progress, sleeper: Callable[[], Sleeper | None]
    ) -> None:
        self.rank = rank
        self.progress = progress
        self.timeout = DEFAULT_TIMEOUT
        self.failure: str | None = None
        self.has_noticed = False  # the rank itself knows
        self.awaited_by_device: int | None = None
        self._links = {link.rank: link for link in links}
        self._sleeper = sleeper
        self._lock = threading.RLock()
        self._ours, self._theirs = socket.socketpair()  # to stir the thread
        self._is_stopped = self._has_left = False
        self._failed_at = self._left_at = 0.0
        self._snapshot, self._changed_at = progress.snapshot, monotonic()
        self._inquiry: _Inquiry | None = None
        self._has_far_links = any(link.page is None for link in links)
        self._seen = Place()
        self._batches = {other: Batches() for other in (rank, *self._links)}

    @property
    def awaited(self) -> int | None:
        """Whom this rank waits for, itself or on its device."""
        awaited = self.progress.awaited
        return self.awaited_by_device if awaited is None else awaited

    @property
    def names(self) -> dict[int, str]:
        """Of all ranks."""
        return {rank: f"rank {rank}{self.progress.replica}" for rank in (self.rank, *self._links)}

    # What the rank itself calls

    def fail(self, reason: str) -> None:
        """The first reason counts; all others are told."""
        with self._lock:
            if self.failure is not None or self._has_left:
                return
            self._failed_at = monotonic()
            self.failure = reason
            self._send(Kind.NEWS, reason)
        self.stir()

    def leave(self) -> None:
        """Say good-bye once."""
        with self._lock:
            if not self._has_left:
                self._has_left = True
                self._send(Kind.LEAVE, str(self.progress.num_batches))

    def begin_batch(self) -> None:
        """Nobody may have ended its batches before this one."""
        with self._lock:
            self._batches[self.rank].num_begun += 1
            self._compare()

    def drain(self) -> None:
        """Nobody may have begun a further one."""
        with self._lock:
            own = self._batches[self.rank]
            own.ended.append(own.num_begun)
            self._send(Kind.DRAIN, str(own.num_begun))
            self._compare()

    def has_left(self, other: int) -> str | None:
        """What to say of a rank that has left."""
        link = self._links.get(other)
        return None if link is None else link.left

    @property
    def has_lost_one(self) -> bool:
        """Whether another rank has hung up that had not left in good order."""
        return any(not link.is_open and link.left is None for link in self._links.values())

    def stir(self) -> None:
        """Let the thread look now."""
        with suppress(OSError):
            self._theirs.send(b".", socket.MSG_DONTWAIT)

    def stop(self) -> None:
        """End the thread."""
        self._is_stopped = True
        self.stir()

    # The thread

    def run(self) -> None:
        """Listen until it is stopped."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._ours, selectors.EVENT_READ)
            for link in self._links.values():
                selector.register(link.connection, selectors.EVENT_READ, link)
                if link.death is not None:
                    selector.register(link.death, selectors.EVENT_READ, link)
            while not self._is_stopped and self._has_work():
                for key, _ in selector.select(self._pause()):
                    if key.data is None:
                        self._ours.recv(4096)
                    elif not self._hear(key.data, has_died=key.fileobj == key.data.death):
                        self._forget(selector, key.data)
                self._look()
            for link in self._links.values():
                link.close()
            self._ours.close()
            self._theirs.close()
            self.progress.close()

    def _has_work(self) -> bool:
        """Whether there is anybody to hear, or this rank must still be told what there was to hear."""
        is_heard = any(link.is_open for link in self._links.values())
        return is_heard or (self.failure is not None and not self.has_noticed)

    def _forget(self, selector: selectors.BaseSelector, link: Link) -> None:
        for file in (link.connection, link.death):
            with suppress(KeyError, ValueError):
                if file is not None:
                    selector.unregister(file)

    def _hear(self, link: Link, *, has_died: bool) -> bool:
        """Whether there will be more to hear."""
        for kind, text in link.receive():
            self._take(link, kind, text)
        if link.is_open and not has_died:
            return True
        link.is_open = False
        if link.left is None:
            gone = "its process has gone" if link.page is not None else "its process has gone, or the connection to it"
            self.fail(f"{self.names[link.rank]} failed {link.place}: {gone}")
        return False

    def _take(self, link: Link, kind: int, text: str) -> None:
        try:
            match Kind(kind):
                case Kind.NEWS:
                    self.fail(text)
                case Kind.LEAVE:
                    link.left = returned(link.rank, int(text), self.progress.replica)
                    self._left_at = monotonic()
                case Kind.DRAIN:
                    with self._lock:
                        self._batches[link.rank].ended.append(int(text))
                        self._compare()
                case Kind.ASK:
                    self._note_progress()
                    awaited = self.awaited
                    link.send(Kind.ANSWER, to_text(self.progress.place, awaited, monotonic() - self._changed_at, text))
                case Kind.ANSWER:
                    answer, number = from_text(text)
                    link.told = answer.place
                    if self._inquiry is not None and self._inquiry.number == number:
                        self._inquiry.answers[link.rank] = answer
                case Kind.SEEN:
                    link.told = from_text(text)[0].place
        except (ValueError, TypeError, KeyError):
            self.fail(f"{self.names[link.rank]} sends what is none of the control channel's messages")

    def _pause(self) -> float:
        if self._left_at and self.progress.awaited is None:
            return _NOW_AND_THEN
        if self._inquiry is not None or self._left_at or (self.failure is not None and not self.has_noticed):
            return _SOON
        most = _NOW_AND_THEN if self._has_far_links else _SELDOM
        return min(max(self.timeout / 8, 0.02), most)

    def _look(self) -> None:
        """Whatever follows from nothing having come."""
        now = monotonic()
        self._note_progress()
        if self.failure is not None:
            self._wake(now)
            return
        self._tell_where()
        awaited = self.awaited
        if awaited is None:
            self._inquiry = None
        elif (left := self.has_left(awaited)) is not None:
            if now - max(self._changed_at, self._left_at) > _LAST_WORDS_SECONDS:
                self.fail(left)
        elif self._inquiry is not None:
            self._judge(self._inquiry, now)
        elif now - self._changed_at > self.timeout:
            self._inquiry = _Inquiry(now)
            self._send(Kind.ASK, self._inquiry.number)

    def _note_progress(self) -> None:
        snapshot = self.progress.snapshot
        if snapshot != self._snapshot:
            self._snapshot, self._changed_at = snapshot, monotonic()

    def _judge(self, inquiry: "_Inquiry", now: float) -> None:
        others = {rank: link for rank, link in self._links.items() if link.left is None}
        silent = {rank: link.place for rank, link in others.items() if rank not in inquiry.answers}
        if silent and now - inquiry.began_at < _ANSWER_SECONDS:
            return
        self._inquiry = None
        own = Answer(self.progress.place, self.awaited, now - self._changed_at)
        answers = inquiry.answers | {self.rank: own}
        verdict = judge(self.rank, answers, silent, self.timeout, self.names)
        if verdict is not None and own.awaited is not None:
            self.fail(verdict.reason)

    def _wake(self, now: float) -> None:
        sleeper = self._sleeper()
        if sleeper is None or self._has_left:
            return
        sleeper.hang_up()
        seconds = now - self._failed_at
        waits = self.progress.awaited is not None
        if seconds > (_WAITING_SECONDS if waits else _BUSY_SECONDS) and (waits or not self.has_noticed):
            sleeper.break_off()

    def _tell_where(self) -> None:
        """Ranks on other hosts cannot look themselves."""
        if self._has_far_links and (place := self.progress.place) != self._seen:
            self._seen = place
            for link in self._links.values():
                if link.page is None:
                    link.send(Kind.SEEN, to_text(place))

    def _compare(self) -> None:
        if (conflict := find_conflict(self._batches, self.names)) is not None:
            self.fail(conflict)

    def _send(self, kind: int, text: str = "") -> None:
        with self._lock:
            for link in self._links.values():
                link.send(kind, text)


class _Inquiry:
    """A question to all ranks, and what they have answered."""

    def __init__(self, now: float) -> None:
        self.began_at = now
        self.number = str(now)
        self.answers: dict[int, Answer] = {}
