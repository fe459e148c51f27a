"""Gloo line: one channel between two hosts, whose frames go over a torch.distributed process group."""

import atexit
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from stagewright.engine.errors import PeerError
from stagewright.engine.transport.capacity import Capacity
from stagewright.engine.transport.contract import KINDS, Channel, Receipt
from stagewright.engine.transport.shared import MAX_UNDER_WAY
from stagewright.engine.value import Packed

if TYPE_CHECKING:
    from stagewright.engine.transport.gloo import GlooTransport

# Tags of one channel: one for what arrives whole, the others in turn for rests.
_NUM_TAGS: Final = 1024


class GlooLine:
    """One channel between two hosts as this rank sees it.

    Args:
        channel: its ends, kind and depth.
        transport: whose it is.
        number: of the transport, among those of its group.
    """

    def __init__(self, channel: Channel, transport: "GlooTransport", number: int) -> None:
        self.channel = channel
        self.tag = (number * len(KINDS) + KINDS.index(channel.kind)) * _NUM_TAGS
        self.capacity = Capacity()
        self.awaited: dict[int, dist.Work] = {}
        self._transport = transport
        self._num_messages = 0
        self._under_way: deque[list[dist.Work]] = deque()

    @property
    def num_awaited(self) -> int:
        """Receives that were posted and not waited for."""
        return len(self.awaited)

    def begin(self) -> None:
        """Count messages from zero."""
        self.capacity.begin()
        self._num_messages = 0

    def send(self, packed: Packed, stage: int, microbatch: int) -> None:
        """Send one frame, and what exceeds the posted receive in a second message."""
        transport, channel = self._transport, self.channel
        frame = transport.codec.write(packed, stage, microbatch)
        index, self._num_messages = self._num_messages, self._num_messages + 1
        capacity = self.capacity.of(index, channel.depth)
        self.capacity.saw(index, frame.numel())
        works = [transport.put(frame[:capacity], channel.destination, self.tag)]
        if frame.numel() > capacity:
            works.append(transport.put(frame[capacity:], channel.destination, self.tag_of_rest(index)))
        self._under_way.append(works)
        if len(self._under_way) > MAX_UNDER_WAY:
            self._finish_oldest()

    def post(self, stage: int, microbatch: int) -> Receipt:
        """Post a receive of the channel's capacity."""
        index, self._num_messages = self._num_messages, self._num_messages + 1
        return _GlooReceipt(self._transport, self, index, stage, microbatch)

    def end(self) -> None:
        """Wait for every send that is still under way."""
        while self._under_way:
            self._finish_oldest()

    def tell(self, reason: str) -> None:
        """Send the news of a failure in the place of the next message."""
        transport = self._transport
        if self.channel.source == transport.rank:
            news = [transport.codec.write_failure(reason)]
            with suppress(RuntimeError):  # that rank may be the one that has gone
                self._under_way.append([transport.group.send(news, self.channel.destination, self.tag)])

    def see_off(self) -> None:
        """Let what is on its way outlive this line.

        A send that is released before it was taken never arrives, and a message whose receive was released stops all
        that comes from that rank after it, while a thread of gloo's turns round on it.
        """
        works = [*(work for works in self._under_way for work in works), *self.awaited.values()]
        if works:
            atexit.register(works.clear)

    def tag_of_rest(self, index: int) -> int:
        """A tag for what exceeds the receive of the index-th frame: rests are fetched in the order of need."""
        return self.tag + 1 + index % (_NUM_TAGS - 1)

    def _finish_oldest(self) -> None:
        for work in self._under_way.popleft():
            self._transport.wait_for(work, self.channel.destination)


class _GlooReceipt:
    __slots__ = ("_frame", "_index", "_line", "_microbatch", "_stage", "_transport", "_work")

    def __init__(self, transport: "GlooTransport", line: GlooLine, index: int, stage: int, microbatch: int) -> None:
        self._transport, self._line, self._index = transport, line, index
        self._stage, self._microbatch = stage, microbatch
        self._frame = transport.codec.empty(line.capacity.of(index, line.channel.depth))
        self._work = transport.receive(self._frame, line.channel.source, line.tag)
        line.awaited[index] = self._work

    def wait(self) -> Packed:
        """Block until the whole frame is there."""
        transport, line, source = self._transport, self._line, self._line.channel.source
        transport.wait_for(self._work, source)
        frame = self._frame
        buffer = frame.numpy().data
        num_bytes = transport.codec.num_bytes(buffer, source)
        line.capacity.saw(self._index, num_bytes)
        if num_bytes > frame.numel():
            frame = transport.codec.enlarged(frame, num_bytes, source)
            buffer = frame.numpy().data
            rest = transport.receive(frame[self._frame.numel() :], source, line.tag_of_rest(self._index))
            transport.wait_for(rest, source)
        del line.awaited[self._index]
        try:
            return transport.codec.read(buffer, self._stage, self._microbatch, source, frame)
        except PeerError as error:
            transport.abort(str(error))  # pass it on: others may wait for this rank
            raise
