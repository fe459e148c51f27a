"""Frame: one message as one block of bytes that describes itself.

A frame is a fixed, checked header (what it is, whose message, the lengths), the layout as JSON, and the tensors,
each aligned so that the receiver uses them where they lie. Nothing in it is ever executed.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor

from stagewright.engine.errors import PeerError
from stagewright.engine.value import Layout, Packed, read_layout, write_layout

MESSAGE: Final = 0x53574D31  # "SWM1"
FAILURE: Final = 0x53574631  # "SWF1"
# what it is, stage, microbatch, length of the text, its CRC-32, length of the whole frame; then a CRC-32 of these
_FIELDS: Final = struct.Struct("<IiiIIQ")
_CHECKSUM: Final = struct.Struct("<I")
HEADER_SIZE: Final = _FIELDS.size + _CHECKSUM.size
# Every receive is at least as large, so a frame up to this size arrives whole; so does every failure.
FIRST_CAPACITY: Final = 4096
_ALIGNMENT: Final = 64
_MAX_KNOWN: Final = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything lies in the frames of one layout.

    Args:
        layout, text, crc: the layout, as it is written, and the checksum of that.
        offsets: of each tensor, in elements of its own.
        strides: of each tensor.
        num_bytes: of the whole frame.
    """

    layout: Layout
    text: bytes
    crc: int
    offsets: Sequence[int]
    strides: Sequence[tuple[int, ...]]
    num_bytes: int

    def tensors(self, frame: Tensor) -> list[Tensor]:
        """The tensors where they lie in a frame.

        They share its memory, but not its version counter: what is done in place to one of them does not make
        autograd think that the others have changed too.
        """
        memory = frame.untyped_storage()
        return [
            torch.empty(0, dtype=dtype).set_(memory, offset, shape, stride)
            for dtype, shape, offset, stride in zip(self.layout.dtypes, self.layout.shapes, self.offsets, self.strides)
        ]


class FrameCodec:
    """Writes and reads frames, remembering the layouts it has seen so that a repeated one costs nothing.

    Args:
        device: where the tensors of a message that was read shall live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._by_layout: dict[Layout, Plan] = {}
        self._by_text: dict[bytes, Plan] = {}

    def write(self, packed: Packed, stage: int, microbatch: int) -> Tensor:
        """A message as one uint8 tensor."""
        plan = self._by_layout.get(packed.layout) or self._remember(packed.layout, write_layout(packed.layout))
        frame = self.empty(plan.num_bytes)
        _write_head(frame, MESSAGE, stage, microbatch, plan.text, plan.crc)
        for tensor, place in zip(packed.tensors, plan.tensors(frame)):
            place.copy_(tensor.detach())
        return frame

    def write_failure(self, reason: str) -> Tensor:
        """The news that this rank has failed, in the place of a message, cut short where it is long."""
        text = reason.encode()[: FIRST_CAPACITY - HEADER_SIZE]
        frame = self.empty(HEADER_SIZE + len(text))
        _write_head(frame, FAILURE, -1, -1, text, zlib.crc32(text))
        return frame

    def empty(self, num_bytes: int) -> Tensor:
        """Memory for a frame, from which a GPU can copy by itself where there is one."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def num_bytes(self, head: Tensor, source: int) -> int:
        """The length of the whole frame whose beginning has arrived.

        Raises:
            ValueError: this is not the beginning of a frame; the sending rank is named.
        """
        buffer = head.numpy().data
        kind, _, _, text_length, _, num_bytes = _FIELDS.unpack_from(buffer)
        (checksum,) = _CHECKSUM.unpack_from(buffer, _FIELDS.size)
        if kind not in (MESSAGE, FAILURE) or checksum != zlib.crc32(buffer[: _FIELDS.size]):
            beginning = bytes(buffer[:HEADER_SIZE]).hex(" ", 4)
            raise ValueError(f"what rank {source} sent is no message of this engine, or a damaged one: {beginning} …")
        if num_bytes < HEADER_SIZE + text_length:
            raise ValueError(f"a message from rank {source} describes itself in {text_length} of its {num_bytes} bytes")
        return int(num_bytes)

    def enlarged(self, head: Tensor, num_bytes: int, source: int) -> Tensor:
        """Memory for a whole frame, with the beginning that has arrived in it.

        Raises:
            ValueError: there is not as much memory; the sending rank is named.
        """
        try:
            frame = self.empty(num_bytes)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"a message from rank {source} wants {num_bytes} bytes of memory: {error}") from error
        frame[: head.numel()] = head
        return frame

    def read(self, frame: Tensor, stage: int, microbatch: int, source: int) -> Packed:
        """The message in a whole frame, whose beginning ``num_bytes`` has checked; its tensors are views of the frame.

        Raises:
            ValueError: the frame is damaged, or is another message than the one expected; the sending rank is named.
            PeerError: there is no message, because the sending rank has failed.
        """
        buffer = frame.numpy().data
        kind, sent_stage, sent_microbatch, text_length, crc, num_bytes = _FIELDS.unpack_from(buffer)
        text = bytes(buffer[HEADER_SIZE : HEADER_SIZE + text_length])
        if zlib.crc32(text) != crc:
            raise ValueError(f"the description of a message from rank {source} is damaged: its checksum does not match")
        if kind == FAILURE:
            raise PeerError(text.decode(errors="replace"))
        if (sent_stage, sent_microbatch) != (stage, microbatch):
            raise ValueError(
                f"rank {source} sent microbatch {sent_microbatch} for stage {sent_stage}, expected was microbatch "
                f"{microbatch} for stage {stage}: the ranks run different programs"
            )
        try:
            plan = self._by_text.get(text) or self._remember(read_layout(text), text)
            if not plan.num_bytes == num_bytes <= frame.numel():
                raise ValueError(f"it has {num_bytes} bytes, but describes {plan.num_bytes}")
            tensors = plan.tensors(frame)
        except (ValueError, RuntimeError, TypeError, OverflowError) as error:  # torch's words for absurd shapes
            raise ValueError(f"a message from rank {source} cannot be read: {error}") from error
        if self._pinned:
            tensors = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
        return Packed(plan.layout, tensors)

    def _remember(self, layout: Layout, text: bytes) -> Plan:
        if len(self._by_text) >= _MAX_KNOWN:  # ever changing shapes must not pile up
            self._by_layout.clear()
            self._by_text.clear()
        offsets, strides = [], []
        end = HEADER_SIZE + len(text)
        for dtype, shape in zip(layout.dtypes, layout.shapes):
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + dtype.itemsize * prod(shape)
            offsets.append(start // dtype.itemsize)
            strides.append(_strides(shape))
        plan = Plan(layout, text, zlib.crc32(text), offsets, strides, end)
        self._by_layout[layout] = self._by_text[text] = plan
        return plan


def _write_head(frame: Tensor, kind: int, stage: int, microbatch: int, text: bytes, crc: int) -> None:
    fields = _FIELDS.pack(kind, stage, microbatch, len(text), crc, frame.numel())
    head = fields + _CHECKSUM.pack(zlib.crc32(fields)) + text
    frame.numpy().data[: len(head)] = head


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor whose elements lie one after the other."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
