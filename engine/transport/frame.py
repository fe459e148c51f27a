"""Frame: one message as one block of bytes that describes itself.

A frame is a fixed header (magic, which message it is, the lengths, a checksum), the layout as JSON, and
the tensors, each aligned so that the receiver uses them where they lie. Nothing in it is ever executed.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from stagewright.engine.value import Layout, Packed, read_layout, write_layout

MAGIC: Final = 0x53574631  # "SWF1"
# magic, stage, microbatch, length of the layout, its CRC-32, length of the whole frame
HEADER: Final = struct.Struct("<IiiIIQ")
_ALIGNMENT: Final = 64
_MAX_KNOWN: Final = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything lies in the frames of one layout."""

    layout: Layout
    text: bytes
    crc: int
    spans: Sequence[tuple[int, int]]
    num_bytes: int


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
        header = HEADER.pack(MAGIC, stage, microbatch, len(plan.text), plan.crc, plan.num_bytes) + plan.text
        frame.numpy()[: len(header)].data[:] = header
        for tensor, (start, end) in zip(packed.tensors, plan.spans):
            if start < end:
                frame[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        return frame

    def empty(self, num_bytes: int) -> Tensor:
        """Memory for a frame, from which a GPU can copy by itself where there is one."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def num_bytes(self, head: Tensor, source: int) -> int:
        """The length of the whole frame whose beginning has arrived.

        Raises:
            ValueError: this is not the beginning of a frame; the sending rank is named.
        """
        magic, *_, num_bytes = HEADER.unpack_from(head.numpy().data)
        if magic != MAGIC or num_bytes < HEADER.size:
            raise ValueError(
                f"what rank {source} sent is no message of this engine: magic {magic:#x}, {num_bytes} bytes"
            )
        return int(num_bytes)

    def read(self, frame: Tensor, stage: int, microbatch: int, source: int) -> Packed:
        """The message in a whole frame; its tensors are views of the frame.

        Raises:
            ValueError: the frame is damaged, or is another message than the one expected; the sending rank is named.
        """
        buffer = frame.numpy().data
        _, sent_stage, sent_microbatch, text_length, crc, num_bytes = HEADER.unpack_from(buffer)
        if (sent_stage, sent_microbatch) != (stage, microbatch):
            raise ValueError(
                f"rank {source} sent microbatch {sent_microbatch} for stage {sent_stage}, expected was microbatch "
                f"{microbatch} for stage {stage}: the ranks run different programs"
            )
        text = bytes(buffer[HEADER.size : HEADER.size + text_length])
        plan = self._by_text.get(text)
        if zlib.crc32(text) != crc:
            raise ValueError(f"the description of a message from rank {source} is damaged: its checksum does not match")
        plan = plan or self._remember(read_layout(text), text)
        if plan.num_bytes != num_bytes or frame.numel() < num_bytes:
            raise ValueError(f"a message from rank {source} has {num_bytes} bytes, but describes {plan.num_bytes}")
        tensors = []
        for dtype, shape, (start, end) in zip(plan.layout.dtypes, plan.layout.shapes, plan.spans):
            tensors.append(frame[start:end].view(dtype).view(shape) if start < end else torch.empty(shape, dtype=dtype))
        if self._pinned:
            tensors = [tensor.to(self._device) for tensor in tensors]
        return Packed(plan.layout, tensors)

    def _remember(self, layout: Layout, text: bytes) -> Plan:
        if len(self._by_layout) >= _MAX_KNOWN:  # ever changing shapes must not pile up
            self._by_layout.clear()
            self._by_text.clear()
        spans = []
        end = HEADER.size + len(text)
        for dtype, shape in zip(layout.dtypes, layout.shapes):
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + dtype.itemsize * _num_elements(shape)
            spans.append((start, end))
        plan = Plan(layout, text, zlib.crc32(text), spans, end)
        self._by_layout[layout] = self._by_text[text] = plan
        return plan


def _num_elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
