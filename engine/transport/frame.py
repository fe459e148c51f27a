"""Frame: one message as one block of bytes that describes itself.

A frame is a fixed, checked header (what it is, whose message, the lengths), the layout as JSON, and the tensors,
each aligned so that the receiver uses them where they lie. Nothing in it is ever executed.
"""

import ctypes
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor

from stagewright.engine.errors import PeerError
from stagewright.engine.value import Layout, Packed
from stagewright.engine.writing import read_layout, write_layout

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
        places: where each tensor begins, and its size, in bytes.
        num_bytes: of the whole frame.
    """

    layout: Layout
    text: bytes
    crc: int
    places: Sequence[tuple[int, int]]
    num_bytes: int

    def tensors(self, buffer: memoryview) -> list[Tensor]:
        """The tensors where they lie in a frame.

        They share its memory, but not a version counter: what is done in place to one of them does not make autograd
        think that the others have changed too.
        """
        layout = self.layout
        return [
            torch.frombuffer(buffer, dtype=dtype, count=size // dtype.itemsize, offset=start).view(shape)
            if size
            else torch.empty(shape, dtype=dtype)
            for dtype, shape, (start, size) in zip(layout.dtypes, layout.shapes, self.places)
        ]

    def views(self, frame: Tensor) -> list[Tensor]:
        """The same as views of a tensor: only then does the allocator of pinned memory know of a copy under way."""
        layout = self.layout
        return [
            frame[start : start + size].view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
            for dtype, shape, (start, size) in zip(layout.dtypes, layout.shapes, self.places)
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
        plan = self.plan(packed.layout)
        frame = self.empty(plan.num_bytes)
        self.fill(frame.numpy().data, frame.data_ptr(), plan, packed, stage, microbatch)
        return frame

    def plan(self, layout: Layout) -> Plan:
        """Where everything will lie in the frame of a message."""
        return self._by_layout.get(layout) or self._remember(layout, write_layout(layout))

    def write_failure(self, reason: str) -> Tensor:
        """The news that this rank has failed, in the place of a message, cut short where it is long."""
        text = reason.encode()[: FIRST_CAPACITY - HEADER_SIZE]
        frame = self.empty(HEADER_SIZE + len(text))
        _write_head(frame.numpy().data, FAILURE, -1, -1, text, zlib.crc32(text))
        return frame

    def empty(self, num_bytes: int) -> Tensor:
        """Memory for a frame, from which a GPU can copy by itself where there is one."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def num_bytes(self, buffer: memoryview, source: int) -> int:
        """The length of the whole frame whose beginning has arrived.

        Raises:
            ValueError: this is not the beginning of a frame; the sending rank is named.
        """
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

    def fill(self, buffer: memoryview, address: int, plan: Plan, packed: Packed, stage: int, microbatch: int) -> None:
        """Write a message.

        Args:
            buffer: for the frame.
            address: where that begins.
            plan: of the message's layout.
            packed: the message.
            stage, microbatch: whose it is.
        """
        _write_head(buffer, MESSAGE, stage, microbatch, plan.text, plan.crc)
        if self._pinned:
            for tensor, place in zip(packed.tensors, plan.tensors(buffer)):
                place.copy_(tensor.detach())
            return
        # Bytes are moved as such: an operation of torch costs more than a small message, above all after a pause.
        for tensor, (start, size) in zip(packed.tensors, plan.places):
            if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
            ctypes.memmove(address + start, tensor.data_ptr(), size)

    def read(self, buffer: memoryview, stage: int, microbatch: int, source: int, frame: Tensor | None = None) -> Packed:
        """The message in a whole frame, whose beginning ``num_bytes`` has checked; its tensors are views of the frame.

        Args:
            buffer: the frame.
            stage, microbatch: whose message is expected.
            source: the sending rank.
            frame: the same memory, where it is pinned for a GPU to copy from.

        Raises:
            ValueError: the frame is damaged, or is another message than the one expected; the sending rank is named.
            PeerError: there is no message, because the sending rank has failed.
        """
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
            if not plan.num_bytes == num_bytes <= len(buffer):
                raise ValueError(f"it has {num_bytes} bytes, but describes {plan.num_bytes}")
            tensors = plan.views(frame) if self._pinned and frame is not None else plan.tensors(buffer)
        except (ValueError, RuntimeError, TypeError, OverflowError) as error:  # torch's words for absurd shapes
            raise ValueError(f"a message from rank {source} cannot be read: {error}") from error
        if self._pinned:
            tensors = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
        return Packed(plan.layout, tensors)

    def _remember(self, layout: Layout, text: bytes) -> Plan:
        if len(self._by_text) >= _MAX_KNOWN:  # ever changing shapes must not pile up
            self._by_layout.clear()
            self._by_text.clear()
        places = []
        end = HEADER_SIZE + len(text)
        for dtype, shape in zip(layout.dtypes, layout.shapes):
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + dtype.itemsize * prod(shape)
            places.append((start, end - start))
        plan = Plan(layout, text, zlib.crc32(text), places, end)
        self._by_layout[layout] = self._by_text[text] = plan
        return plan


def _write_head(buffer: memoryview, kind: int, stage: int, microbatch: int, text: bytes, crc: int) -> None:
    fields = _FIELDS.pack(kind, stage, microbatch, len(text), crc, len(buffer))
    head = fields + _CHECKSUM.pack(zlib.crc32(fields)) + text
    buffer[: len(head)] = head
