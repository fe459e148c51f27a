"""Neighbour: another rank on this host, reached without gloo.

Frames lie in memory that both ranks share (see ``arena``); a socket carries a few bytes a frame, which say where. The
waiting rank reads the socket itself: no thread stands between the ranks, so that one wake-up is all a message costs,
and a process that ends is noticed at once, because its end of the socket closes.
"""

import os
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from stagewright.engine.control.channel import Control
from stagewright.engine.control.progress import AWAITED, NOBODY, Progress
from stagewright.engine.errors import PeerError
from stagewright.engine.transport.arena import FREE, SENT, Arena, make_file
from stagewright.engine.transport.frame import HEADER_SIZE

# what it is, arena, slot, number of bytes
_SIGNAL: Final = struct.Struct("<BIBQ")
# What is no frame of the line with that number: new memory, memory that is given up, and the news of a failure.
_NEW_ARENA, _LOST_ARENA, _NEWS = 253, 254, 255
_LONGEST: Final = 4096
_ROOM_FOR_FILE: Final = socket.CMSG_SPACE(struct.calcsize("i"))
_NUM_IDLE_RUNS: Final = 8  # for which memory is kept that nothing is written to
_PAUSE: Final = 0.0002  # seconds between two looks whether the other rank has taken something


class Outbox:
    """The frames of one line that were sent, or can be.

    Args:
        neighbour: where they go.
        number: of the line.
    """

    def __init__(self, neighbour: "Neighbour", number: int) -> None:
        self._neighbour, self._number = neighbour, number
        self.arenas: dict[int, Arena] = {}
        self._num_runs = 0
        self._last_used: dict[int, int] = {}  # arena -> run
        self._under_way: deque[tuple[Arena, int]] = deque()

    def await_room(self, limit: int) -> None:
        """Wait until fewer frames than the limit were sent and not taken."""
        while len(self._under_way) >= limit:
            self._drop_taken()
            if len(self._under_way) >= limit:
                self._neighbour.pause()

    def space(self, num_bytes: int) -> tuple[int, int, memoryview, int]:
        """The arena, slot, memory and address of the next frame."""
        for number, arena in self.arenas.items():
            if num_bytes <= arena.capacity:
                for slot in range(len(arena)):
                    if arena.flag(slot) == FREE:
                        return number, slot, arena.space(slot, num_bytes), arena.address(slot)
        number = self._neighbour.new_arena(num_bytes, self.arenas)
        arena = self.arenas[number]
        return number, 0, arena.space(0, num_bytes), arena.address(0)

    def send(self, number: int, slot: int, num_bytes: int) -> None:
        """Say that the frame has been written."""
        self._drop_taken()  # above all what this very slot held before
        arena = self.arenas[number]
        arena.mark(slot, SENT)
        self._last_used[number] = self._num_runs
        self._under_way.append((arena, slot))
        self._neighbour.signal(self._number, number, slot, num_bytes)

    def _drop_taken(self) -> None:
        """Forget frames that were taken; that happens in the order of sending."""
        under_way = self._under_way
        while under_way and under_way[0][0].flag(under_way[0][1]) != SENT:
            under_way.popleft()

    def begin(self) -> None:
        """A run begins: give up memory that the last ones had no use for."""
        self._num_runs += 1
        idle = [number for number, run in self._last_used.items() if self._num_runs - run > _NUM_IDLE_RUNS]
        for number in idle:
            if self.arenas[number].is_free:
                del self.arenas[number], self._last_used[number]
                self._neighbour.signal(_LOST_ARENA, number)


class Neighbour:
    """One other rank.

    Args:
        rank: it.
        connection: a socket to it that keeps messages whole.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self._connection = connection
        self._arenas: dict[int, Arena] = {}  # of the other rank
        self._num_arenas = 0  # of this one
        self._arrived: dict[int, deque[tuple[int, int, int]]] = {}
        self._news: str | None = None
        self.control: Control | None = None
        self.progress = Progress(rank)

    def take(self, line: int) -> memoryview:
        """The next frame of a line, as soon as it is there.

        Raises:
            PeerError: the other rank has failed, has returned, or has gone.
        """
        arrived = self._arrived.setdefault(line, deque())
        if not arrived:
            self.progress.await_rank(self.rank)
            try:
                while not arrived:
                    self._hear()
            finally:
                self.progress.awaits_nobody()
        number, slot, num_bytes = arrived.popleft()
        return self._arenas[number].take(slot, num_bytes)

    def new_arena(self, num_bytes: int, arenas: dict[int, Arena]) -> int:
        """Make memory for frames of a size, and hand it over."""
        file, capacity = make_file(num_bytes)
        try:
            number, self._num_arenas = self._num_arenas, self._num_arenas + 1
            arenas[number] = Arena(file, capacity)
            self.signal(_NEW_ARENA, number, 0, capacity, file)
        finally:
            os.close(file)
        return number

    def signal(self, what: int, arena: int, slot: int = 0, num_bytes: int = 0, file: int | None = None) -> None:
        """Send a few bytes."""
        data = _SIGNAL.pack(what, arena, slot, num_bytes)
        try:
            if file is None:
                self._connection.send(data)
            else:
                socket.send_fds(self._connection, [data], [file])
        except OSError:
            self._raise_last_words()

    def tell(self, reason: str) -> None:
        """The news that this rank has failed."""
        with suppress(OSError):  # it may be the other one that has gone
            text = reason.encode()[: _LONGEST - _SIGNAL.size]
            self._connection.send(_SIGNAL.pack(_NEWS, 0, 0, len(text)) + text, socket.MSG_DONTWAIT)

    def pause(self) -> None:
        """Let the other rank go on for a moment.

        Raises:
            PeerError: it does not go on.
        """
        with suppress(BlockingIOError):
            self._hear(socket.MSG_DONTWAIT)
        cells = self.progress.cells
        cells[AWAITED] = self.rank + 1
        time.sleep(_PAUSE)
        cells[AWAITED] = NOBODY

    def hang_up(self) -> None:
        """Let whoever waits here, now or later, wait no more; another thread calls this."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

    def __del__(self) -> None:
        """Hang up; what was sent still arrives."""
        self._connection.close()

    def _raise_last_words(self) -> None:
        """The other rank takes nothing more: say why, if it has said so."""
        while True:
            try:
                self._hear(socket.MSG_DONTWAIT)
            except BlockingIOError:
                raise PeerError(self._gone()) from None

    def _hear(self, flags: int = 0) -> None:
        """Read one signal, which nothing but the order of sending determines."""
        if self._news is not None:
            raise PeerError(self._news)
        try:
            data, ancillary, *_ = self._connection.recvmsg(_LONGEST, _ROOM_FOR_FILE, flags)
        except BlockingIOError:
            raise
        except ConnectionResetError:  # it has gone without having read everything; what it said before comes next
            return
        except OSError as error:
            raise PeerError(self._gone()) from error
        files = [file for *_, data_of in ancillary for (file,) in struct.iter_unpack("i", data_of)]
        if not data:
            raise PeerError(self._gone())
        try:
            self._note(data, files)
        finally:
            for file in files:
                os.close(file)

    def _note(self, data: bytes, files: Sequence[int]) -> None:
        try:
            what, number, slot, num_bytes = _SIGNAL.unpack_from(data)
            if what == _NEWS:
                self._news = data[_SIGNAL.size :].decode(errors="replace")
            elif what == _NEW_ARENA:
                (file,) = files
                self._arenas[number] = Arena.opened(file, num_bytes)
            elif what == _LOST_ARENA:
                del self._arenas[number]
            elif slot < len(arena := self._arenas[number]) and HEADER_SIZE <= num_bytes <= arena.capacity:
                self._arrived.setdefault(what, deque()).append((number, slot, num_bytes))
            else:
                raise ValueError(f"{num_bytes} bytes in slot {slot} of memory for {len(arena)} x {arena.capacity}")
        except (struct.error, KeyError, ValueError, OSError) as error:
            raise ValueError(f"what rank {self.rank} sent makes no sense: {data[:32].hex(' ', 4)} ({error})") from error

    def _gone(self) -> str:
        return f"rank {self.rank} has gone" if self.control is None else self.control.reason(self.rank)
