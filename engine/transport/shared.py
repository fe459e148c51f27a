"""Shared: one channel between two ranks of one host, whose frames lie in memory that both have."""

from collections.abc import Callable
from typing import Final

from stagewright.engine.errors import PeerError
from stagewright.engine.transport.contract import KINDS, Channel
from stagewright.engine.transport.frame import FrameCodec, Plan
from stagewright.engine.transport.neighbour import Neighbour, Outbox
from stagewright.engine.value import Packed

# Frames of a channel that may be under way before a send waits for the oldest of them to be taken.
MAX_UNDER_WAY: Final = 8


class SharedLine:
    """The channel as one of its ranks sees it.

    Args:
        channel: its ends, kind and depth.
        neighbour: the other end.
        codec: writes and reads frames.
        abort: passes the news of a failure on.
    """

    def __init__(self, channel: Channel, neighbour: Neighbour, codec: FrameCodec, abort: Callable[[str], None]) -> None:
        self.channel = channel
        self.num_awaited = 0
        self._neighbour, self._codec, self._abort = neighbour, codec, abort
        self._number = KINDS.index(channel.kind)
        self._outbox = Outbox(neighbour, self._number)
        self._plan: Plan | None = None  # of the last frame
        self._num_posted = self._num_arrived = 0
        self._arrived: dict[int, memoryview] = {}

    def begin(self) -> None:
        """Memory that the last run had no use for is given up."""
        self._outbox.begin()

    def send(self, packed: Packed, stage: int, microbatch: int) -> None:
        """Write one frame where the other rank will read it, and say so."""
        plan = self._plan
        if plan is None or packed.layout is not plan.layout:
            self._plan = plan = self._codec.plan(packed.layout)
        try:
            self._outbox.await_room(max(MAX_UNDER_WAY, self.channel.depth))
            arena, slot, space, address = self._outbox.space(plan.num_bytes)
            self._codec.fill(space, address, plan, packed, stage, microbatch)
            self._outbox.send(arena, slot, plan.num_bytes)
        except PeerError as error:
            self._abort(str(error))
            raise

    def post(self, stage: int, microbatch: int) -> "_SharedReceipt":
        """Note that the next frame is awaited; its memory is there already."""
        index, self._num_posted = self._num_posted, self._num_posted + 1
        self.num_awaited += 1
        return _SharedReceipt(self, index, stage, microbatch)

    def take(self, index: int, stage: int, microbatch: int) -> Packed:
        """The index-th frame."""
        try:
            while self._num_arrived <= index:
                self._arrived[self._num_arrived] = self._neighbour.take(self._number)
                self._num_arrived += 1
        except PeerError as error:
            self._abort(str(error))  # pass it on: others may wait for this rank
            raise
        space = self._arrived.pop(index)
        self.num_awaited -= 1
        source = self.channel.source
        self._codec.num_bytes(space, source)
        return self._codec.read(space, stage, microbatch, source)

    def end(self) -> None:
        """What was sent arrives without this rank."""

    def tell(self, reason: str) -> None:
        """The neighbour has been told."""

    def see_off(self) -> None:
        """What was sent needs nobody."""


class _SharedReceipt:
    __slots__ = ("_index", "_line", "_microbatch", "_stage")

    def __init__(self, line: SharedLine, index: int, stage: int, microbatch: int) -> None:
        self._line, self._index, self._stage, self._microbatch = line, index, stage, microbatch

    def wait(self) -> Packed:
        """Block until the frame is there."""
        return self._line.take(self._index, self._stage, self._microbatch)
