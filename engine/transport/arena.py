"""Arena: memory that two processes of one host share, for the frames of one line.

The sender makes it and writes its frames there, the receiver uses them where they lie: nothing is copied on the way.
Each slot begins with a flag. It is *sent* from when its frame was written until the receiver takes that, then *taken*
for as long as any tensor of the frame is alive there, and *free* after that. Such memory has no name in any file
system, so nothing of it is left, however the processes end.
"""

import ctypes
import fcntl
import mmap
import os
from typing import Final
from weakref import ref

NUM_SLOTS: Final = 16
FREE, SENT, TAKEN = range(3)

_FLAG_SIZE: Final = 64  # so that frames begin where a cache line does
_LEAST_CAPACITY: Final = 4096


class Arena:
    """The slots of one mapping, as either end sees them; their pages exist from when they are first written to.

    Args:
        file: what is mapped; it may be closed afterwards.
        capacity: of each slot, in bytes.
    """

    def __init__(self, file: int, capacity: int) -> None:
        self.capacity = capacity
        self.memory = mmap.mmap(file, _size(capacity))
        self.buffer = memoryview(self.memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._leases: list[ref[memoryview] | None] = [None] * NUM_SLOTS

    @classmethod
    def opened(cls, file: int, capacity: int) -> "Arena":
        """The receiver's side.

        Raises:
            ValueError: what was handed over is smaller than it is said to be, or could become so.
        """
        if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(file).st_size < _size(capacity):
            raise ValueError(f"shared memory for {NUM_SLOTS} frames of {capacity} bytes is too small, or not sealed")
        return cls(file, capacity)

    def __len__(self) -> int:
        return NUM_SLOTS

    def flag(self, slot: int) -> int:
        """FREE, SENT or TAKEN."""
        return self.memory[slot * (_FLAG_SIZE + self.capacity)]

    def mark(self, slot: int, flag: int) -> None:
        """Set it."""
        self.memory[slot * (_FLAG_SIZE + self.capacity)] = flag

    def space(self, slot: int, num_bytes: int) -> memoryview:
        """Where the frame of a slot lies."""
        start = slot * (_FLAG_SIZE + self.capacity) + _FLAG_SIZE
        return self.buffer[start : start + num_bytes]

    def address(self, slot: int) -> int:
        """Where that is."""
        return self._address + slot * (_FLAG_SIZE + self.capacity) + _FLAG_SIZE

    def take(self, slot: int, num_bytes: int) -> memoryview:
        """The frame of a slot, which is free again when nobody refers to it any more."""
        space = self.space(slot, num_bytes)
        lease = _Lease(space, _release)
        lease.memory, lease.position = self.memory, slot * (_FLAG_SIZE + self.capacity)
        self._leases[slot] = lease
        self.memory[lease.position] = TAKEN
        return space

    @property
    def is_free(self) -> bool:
        """Whether no slot is in use."""
        return all(self.flag(slot) == FREE for slot in range(NUM_SLOTS))


class _Lease(ref[memoryview]):
    __slots__ = ("memory", "position")

    memory: mmap.mmap
    position: int


def _release(lease: "ref[memoryview]") -> None:
    assert isinstance(lease, _Lease), "nothing else calls this"
    lease.memory[lease.position] = FREE


def make_file(num_bytes: int) -> tuple[int, int]:
    """Memory without a name for slots of at least so many bytes, as a file, and the capacity of each."""
    capacity = max(_LEAST_CAPACITY, 1 << (num_bytes - 1).bit_length())
    file = os.memfd_create("stagewright", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, _size(capacity))
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return file, capacity


def _size(capacity: int) -> int:
    return NUM_SLOTS * (_FLAG_SIZE + capacity)
