"""Gloo: ranks as processes that exchange frames over a torch.distributed process group on CPUs."""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.engine.transport.contract import Channel, Kind, Line, Receipt, Session
from stagewright.engine.transport.frame import HEADER, FrameCodec
from stagewright.engine.value import Packed

# A frame up to the capacity of its channel travels whole; of a larger one the rest follows in a second message.
_FIRST_CAPACITY: Final = 4096
_TAGS: Final[dict[Kind, int]] = {"activation": 0, "gradient": 1, "replica": 2}
# Frames of a channel that may be under way before a send waits for the oldest of them to be taken.
_MAX_UNDER_WAY: Final = 8


class _Capacity:
    """How large the receives of a channel are, known to both its ends without a word.

    A gloo receive smaller than its message aborts the process, so the size of the k-th receive must be known to the
    sender. When the k-th is posted, both ends have seen all frames up to the (k - depth)-th (see Channel): it is as
    large as the largest of those.
    """

    def __init__(self) -> None:
        self.settled = _FIRST_CAPACITY
        self._recent: dict[int, int] = {}
        self._num_settled = 0

    def of(self, index: int, depth: int) -> int:
        """Bytes of the index-th receive since the program began."""
        while self._num_settled <= index - depth:
            self.settled = max(self.settled, self._recent.pop(self._num_settled))
            self._num_settled += 1
        return self.settled

    def saw(self, index: int, num_bytes: int) -> None:
        """Note the size of the index-th frame."""
        self._recent[index] = num_bytes

    def begin(self) -> None:
        """All frames of the last program are known to both ends."""
        self.settled = max([self.settled, *self._recent.values()])
        self._recent.clear()
        self._num_settled = 0


class _Line:
    """One channel as this rank sees it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.tag = 2 * _TAGS[channel.kind]
        self.tag_of_rest = self.tag + 1
        self.capacity = _Capacity()
        self.num_messages = 0
        self.under_way: deque[list[dist.Work]] = deque()


class _GlooReceipt:
    __slots__ = ("_frame", "_index", "_line", "_microbatch", "_stage", "_transport", "_work")

    def __init__(self, transport: "GlooTransport", line: _Line, index: int, stage: int, microbatch: int) -> None:
        self._transport, self._line, self._index = transport, line, index
        self._stage, self._microbatch = stage, microbatch
        self._frame = transport.codec.empty(line.capacity.of(index, line.channel.depth))
        self._work = transport.group.recv([self._frame], line.channel.source, line.tag)

    def wait(self) -> Packed:
        """Block until the whole frame is there."""
        self._work.wait()
        line, frame = self._line, self._frame
        source = line.channel.source
        num_bytes = self._transport.codec.num_bytes(frame, source)
        line.capacity.saw(self._index, num_bytes)
        if num_bytes > frame.numel():
            whole = self._transport.codec.empty(num_bytes)
            whole[: frame.numel()] = frame
            self._transport.group.recv([whole[frame.numel() :]], source, line.tag_of_rest).wait()
            frame = whole
        return self._transport.codec.read(frame, self._stage, self._microbatch, source)


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
        self._lines: dict[Line, _Line] = {}

    def open(self, channels: Sequence[Channel]) -> None:
        """Nothing to make ready: gloo connects any two ranks."""

    def begin(self, session: Session) -> None:
        """Start a run: every channel counts its messages from zero."""
        for line in self._lines.values():
            line.capacity.begin()
            line.num_messages = 0

    def send(self, channel: Channel, packed: Packed, stage: int, microbatch: int) -> None:
        """Send one frame, and what exceeds the posted receive in a second message."""
        line = self._line(channel)
        frame = self.codec.write(packed, stage, microbatch)
        capacity = line.capacity.of(line.num_messages, channel.depth)
        line.capacity.saw(line.num_messages, frame.numel())
        line.num_messages += 1
        works = [self.group.send([frame[:capacity]], channel.destination, line.tag)]
        if frame.numel() > capacity:
            works.append(self.group.send([frame[capacity:]], channel.destination, line.tag_of_rest))
        line.under_way.append(works)
        if len(line.under_way) > _MAX_UNDER_WAY:
            _wait(line.under_way.popleft())

    def post(self, channel: Channel, stage: int, microbatch: int) -> Receipt:
        """Post a receive of the channel's capacity."""
        line = self._line(channel)
        index, line.num_messages = line.num_messages, line.num_messages + 1
        return _GlooReceipt(self, line, index, stage, microbatch)

    def end(self) -> None:
        """Wait for every send that is still under way."""
        for line in self._lines.values():
            while line.under_way:
                _wait(line.under_way.popleft())

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes."""
        own = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num_ranks)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self.group)
        longest = max(1, *(int(length) for length in lengths))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: own.numel()] = own
        blocks = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.num_ranks)]
        dist.all_gather(blocks, padded, group=self.group)
        return [_bytes(block[: int(length)]) for block, length in zip(blocks, lengths)]

    def abort(self, reason: str) -> None:
        """Nothing to do: the launcher ends the other processes."""

    def close(self) -> None:
        """Drop the channels; the process group belongs to whoever made it."""
        self._lines.clear()

    def _line(self, channel: Channel) -> _Line:
        line = self._lines.get(channel.line)
        if line is None:
            line = self._lines[channel.line] = _Line(channel)
        line.channel = channel
        return line


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _bytes(block: Tensor) -> bytes:
    return bytes(block.numpy().data)


assert HEADER.size <= _FIRST_CAPACITY
