"""Gloo: ranks as processes that exchange frames over a torch.distributed process group on CPUs."""

import atexit
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.engine.errors import PeerError
from stagewright.engine.transport.capacity import Capacity
from stagewright.engine.transport.contract import OCCUPIED, Channel, Kind, Line, Receipt, Session, Transport
from stagewright.engine.transport.frame import FrameCodec
from stagewright.engine.value import Packed, pack

_TAGS: Final[dict[Kind, int]] = {"activation": 0, "gradient": 1, "replica": 2, "tied": 3, "gather": 4, "scalars": 5}
# Frames of a channel that may be under way before a send waits for the oldest of them to be taken.
_MAX_UNDER_WAY: Final = 8
# Tags of one channel: one for what arrives whole, the others in turn for rests.
_NUM_TAGS: Final = 1024


class _Line:
    """One channel as this rank sees it.

    Args:
        channel: its ends, kind and depth.
        number: of the transport, among those of its group.
    """

    def __init__(self, channel: Channel, number: int) -> None:
        self.channel = channel
        self.tag = (number * len(_TAGS) + _TAGS[channel.kind]) * _NUM_TAGS
        self.capacity = Capacity()
        self.num_messages = 0
        self.awaited: dict[int, dist.Work] = {}
        self.under_way: deque[list[dist.Work]] = deque()

    def tag_of_rest(self, index: int) -> int:
        """A tag for what exceeds the receive of the index-th frame: rests are fetched in the order of need."""
        return self.tag + 1 + index % (_NUM_TAGS - 1)


class _GlooReceipt:
    __slots__ = ("_frame", "_index", "_line", "_microbatch", "_stage", "_transport", "_work")

    def __init__(self, transport: "GlooTransport", line: _Line, index: int, stage: int, microbatch: int) -> None:
        self._transport, self._line, self._index = transport, line, index
        self._stage, self._microbatch = stage, microbatch
        self._frame = transport.codec.empty(line.capacity.of(index, line.channel.depth))
        self._work = transport.receive(self._frame, line.channel.source, line.tag)
        line.awaited[index] = self._work

    def wait(self) -> Packed:
        """Block until the whole frame is there."""
        transport, line, source = self._transport, self._line, self._line.channel.source
        transport.wait_for(self._work, source)
        num_bytes = transport.codec.num_bytes(self._frame, source)
        line.capacity.saw(self._index, num_bytes)
        frame = self._frame
        if num_bytes > frame.numel():
            frame = transport.codec.enlarged(frame, num_bytes, source)
            rest = transport.receive(frame[self._frame.numel() :], source, line.tag_of_rest(self._index))
            transport.wait_for(rest, source)
        del line.awaited[self._index]
        try:
            return transport.codec.read(frame, self._stage, self._microbatch, source)
        except PeerError as error:
            transport.abort(str(error))  # pass it on: others may wait for this rank
            raise


class GlooTransport:
    """Frames over a gloo process group; one block of bytes a message, nothing pickled.

    Args:
        group: the process group of the pipeline's ranks; the default group where left out.
        device: where the tensors live; those of a GPU travel through pinned host memory, which also serves ranks
            that share one GPU.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        self.group = group or dist.distributed_c10d._get_default_group()
        self.rank: int = self.group.rank()
        self.num_ranks: int = self.group.size()
        self.device = device or torch.device("cpu")
        self.baton: AbstractContextManager[object] = nullcontext()
        self.codec = FrameCodec(self.device)
        # Several transports of one group, made in one order on all ranks, keep apart by their tags.
        self._number: int = self.group.get_group_store().add(f"stagewright transports of rank {self.rank}", 1)
        self._lines: dict[Line, _Line] = {}
        self._num_gathers = 0
        self._failure: str | None = None
        for other in range(1, self.num_ranks):
            self.open([_gathering(0, other), _gathering(other, 0)])

    @property
    def host(self) -> Transport:
        """This one."""
        return self

    def open(self, channels: Sequence[Channel]) -> None:
        """Note the channels of this rank; gloo connects any two ranks by itself."""
        for channel in channels:
            if self.rank in (channel.source, channel.destination):
                self._line(channel)

    def begin(self, session: Session) -> None:
        """Start a run: every channel counts its messages from zero.

        Raises:
            PeerError: a rank has failed before.
            ValueError: another pipeline has something in flight here.
        """
        if self._failure is not None:
            raise PeerError(f"the pipeline cannot go on after a failure: {self._failure}")
        if any(line.awaited for line in self._lines.values()):
            raise ValueError(OCCUPIED)
        for line in self._lines.values():
            line.capacity.begin()
            line.num_messages = 0

    def send(self, channel: Channel, packed: Packed, stage: int, microbatch: int) -> None:
        """Send one frame, and what exceeds the posted receive in a second message."""
        line = self._line(channel)
        frame = self.codec.write(packed, stage, microbatch)
        index, line.num_messages = line.num_messages, line.num_messages + 1
        capacity = line.capacity.of(index, channel.depth)
        line.capacity.saw(index, frame.numel())
        try:
            works = [self.group.send([frame[:capacity]], channel.destination, line.tag)]
            if frame.numel() > capacity:
                works.append(self.group.send([frame[capacity:]], channel.destination, line.tag_of_rest(index)))
        except RuntimeError as error:
            self._lost(channel.destination, error)
        line.under_way.append(works)
        if len(line.under_way) > _MAX_UNDER_WAY:
            self._finish_oldest(line)

    def post(self, channel: Channel, stage: int, microbatch: int) -> Receipt:
        """Post a receive of the channel's capacity."""
        line = self._line(channel)
        index, line.num_messages = line.num_messages, line.num_messages + 1
        return _GlooReceipt(self, line, index, stage, microbatch)

    def end(self) -> None:
        """Wait for every send that is still under way."""
        for line in self._lines.values():
            while line.under_way:
                self._finish_oldest(line)

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes: all to the first rank, and from there to all."""
        turn, self._num_gathers = self._num_gathers, (self._num_gathers + 1) % 2**31
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        first, others = 0, range(1, self.num_ranks)
        if self.rank == first:
            receipts = [self.post(_gathering(other, first), 0, turn) for other in others]
            letters = pack([own, *(receipt.wait().tensors[0] for receipt in receipts)], "the ranks", "data")
            for other in others:
                self.send(_gathering(first, other), letters, 0, turn)
        else:
            self.send(_gathering(self.rank, first), pack(own, f"rank {self.rank}", "data"), 0, turn)
            letters = self.post(_gathering(first, self.rank), 0, turn).wait()
        for line in self._lines.values():
            while line.channel.kind == "gather" and line.under_way:
                self._finish_oldest(line)
        return [bytes(letter.cpu().numpy().data) for letter in letters.tensors]

    def abort(self, reason: str) -> None:
        """Send the news in the place of the next message on every channel; the first reason counts."""
        if self._failure is not None or self.num_ranks == 1:
            return
        self._failure = reason
        last_words: list[dist.Work] = []
        for line in self._lines.values():
            if line.channel.source == self.rank:
                news = [self.codec.write_failure(reason)]
                with suppress(RuntimeError):  # that rank may be the one that has gone
                    last_words.append(self.group.send(news, line.channel.destination, line.tag))
        self._see_off(last_words)

    def close(self) -> None:
        """Release nothing but this transport's own memory: the process group belongs to whoever made it."""
        self._see_off([])

    def receive(self, data: Tensor, source: int, tag: int) -> dist.Work:
        """Post a receive of bytes."""
        try:
            return self.group.recv([data], source, tag)
        except RuntimeError as error:
            self._lost(source, error)

    def wait_for(self, work: dist.Work, other: int) -> None:
        """Block until something is sent to, or received from, another rank.

        Raises:
            PeerError: that rank has gone.
        """
        try:
            work.wait()
        except RuntimeError as error:
            self._lost(other, error)

    def _see_off(self, last_words: list[dist.Work]) -> None:
        """Let what is on its way outlive this transport.

        A send that is released before it was taken never arrives, and a message whose receive was released stops all
        that comes from that rank after it, while a thread of gloo's turns round on it.
        """
        lines = self._lines.values()
        under_way = [work for line in lines for works in line.under_way for work in works]
        awaited = [work for line in lines for work in line.awaited.values()]
        if under_way or awaited or last_words:
            atexit.register([*under_way, *awaited, *last_words].clear)

    def _finish_oldest(self, line: _Line) -> None:
        for work in line.under_way.popleft():
            self.wait_for(work, line.channel.destination)

    def _lost(self, other: int, error: RuntimeError) -> NoReturn:
        """Every RuntimeError of gloo, whatever it says, means that there is no way to go on with that rank."""
        reason = f"rank {other} has gone, or the connection to it ({error})"
        self.abort(reason)
        raise PeerError(reason) from error

    def _line(self, channel: Channel) -> _Line:
        line = self._lines.get(channel.line)
        if line is None:
            line = self._lines[channel.line] = _Line(channel, self._number)
        line.channel = channel
        return line


def _gathering(source: int, destination: int) -> Channel:
    return Channel(source, destination, "gather")
