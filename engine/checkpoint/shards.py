"""Checkpoint, shards: tensors in a file, in the format of safetensors.

    8 bytes    the size of the header, little-endian
    header     JSON: name -> {"dtype": "F32", "shape": [2, 3], "data_offsets": [start, end]}, padded with spaces
    data       the elements of all tensors, one after the other, without gaps

Nothing in it can be executed. Whoever has the safetensors library can read these files with it, and what it writes can
be read here; that every size is checked before memory is taken is what this module adds to ``json`` and ``read``.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor, nn

from stagewright.engine.checkpoint.files import Part, Written

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER: Final = 100_000_000  # as in safetensors
_MAX_DIMENSIONS: Final = 64  # as in torch
_PIECE: Final = 1 << 20


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in the data of a shard."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def parts_of(tensors: Mapping[str, Tensor]) -> Iterator[Part]:
    """The bytes of a shard, piece by piece: none is copied but those of tensors on a GPU, and of scattered ones.

    Raises:
        ValueError: a tensor is of a kind that the format does not have.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        check_plain(name, tensor)
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        data = bytes_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
        for start in range(0, len(data), _PIECE):
            yield data[start : start + _PIECE]


def check_plain(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that the format does not have."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        raise ValueError(f"a checkpoint keeps plain dense tensors: {name} is a {type(tensor).__name__}")
    if tensor.dtype not in _NAMES:
        raise ValueError(f"a checkpoint keeps no tensors of type {tensor.dtype}: {name} is one")


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data.cast("B") if data.nbytes else memoryview(b"")


class Shard:
    """A shard that can be read; all its sizes have been checked.

    Args:
        path: of the file.
        written: what it must be; where left out, any whole file will do.

    Raises:
        ValueError: it is missing, cut off, of another format, or not what was written.
    """

    def __init__(self, path: Path, written: Written | None = None) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if written is not None:
                    _check_whole(file, size, written)
                self._start, header = _read_header(file, size)
        except (OSError, ValueError, RecursionError) as error:
            raise unreadable(path, error) from error
        try:
            self.entries = {name: _entry(name, value) for name, value in header.items() if name != "__metadata__"}
            _check_gapless(self.entries, size - self._start)
        except ValueError as error:
            raise unreadable(path, error) from error

    def read(self, name: str) -> Tensor:
        """A tensor on the CPU.

        Raises:
            ValueError: there is none of this name.
        """
        if name not in self.entries:
            raise unreadable(self.path, f"there is no {name}")
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        try:
            with self.path.open("rb") as file:
                file.seek(self._start + entry.start)
                num_read = file.readinto(bytes_of(tensor)) if entry.end > entry.start else 0
        except OSError as error:
            raise unreadable(self.path, error) from error
        if num_read != entry.end - entry.start:
            raise unreadable(self.path, f"it ends within {name}")
        return tensor


def shard_of_bytes(data: bytes) -> dict[str, Tensor]:
    """The tensors of a shard that another rank has sent."""
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, value in json.loads(data[8:start].decode()).items():
        entry = _entry(name, value)
        tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
        bytes_of(tensors[name])[:] = data[start + entry.start : start + entry.end]
    return tensors


def unreadable(path: Path, reason: object) -> ValueError:
    """What to raise of a file."""
    text = "it is not there" if isinstance(reason, FileNotFoundError) else str(reason)
    return ValueError(f"{path} cannot be read: {text}")


def _check_whole(file: BinaryIO, size: int, written: Written) -> None:
    if size != written.num_bytes:
        raise ValueError(f"{written.num_bytes} bytes were written, but it has {size}")
    digest = hashlib.sha256()
    while piece := file.read(_PIECE):
        digest.update(piece)
    if digest.hexdigest() != written.sha256:
        raise ValueError(f"its contents have changed since they were written: their SHA-256 is {digest.hexdigest()}")
    file.seek(0)


def _read_header(file: BinaryIO, size: int) -> tuple[int, dict[str, Any]]:
    """Where the data start, and what the header says of them."""
    num_bytes = int.from_bytes(file.read(8), "little")
    if size < 8 or num_bytes > min(size - 8, _MAX_HEADER):
        raise ValueError(f"it has {size} bytes, too few for a header of {num_bytes}: this is no safetensors file")
    header = json.loads(file.read(num_bytes).decode())
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object: this is no safetensors file")
    return 8 + num_bytes, header


def _entry(name: str, value: Any) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, end]} if dtype in DTYPES and all(
            type(number) is int and number >= 0 for number in (*shape, start, end)
        ):
            entry = Entry(DTYPES[dtype], tuple(shape), start, end)
        case _:
            raise ValueError(f"{name} has no type, shape and place: got {value!s:.100}")
    if len(entry.shape) > _MAX_DIMENSIONS or math.prod(max(size, 1) for size in shape) > 2**48:
        raise ValueError(f"{name} has the impossible shape {shape!s:.100}")
    num_bytes = math.prod(entry.shape) * entry.dtype.itemsize
    if entry.end - entry.start != num_bytes:
        raise ValueError(f"{name} of shape {shape} takes {num_bytes} bytes: got those from {start} to {end}")
    return entry


def _check_gapless(entries: Mapping[str, Entry], num_bytes: int) -> None:
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            raise ValueError(f"tensors lie one after the other: {name} starts at {entry.start} and not at {end}")
        end = entry.end
    if end != num_bytes:
        raise ValueError(f"its tensors take {end} bytes, but there are {num_bytes}")
