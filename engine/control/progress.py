"""Progress: where a rank is in its program, kept where others can read it even when the rank can no longer tell.

The executor writes one number an instruction into a page of memory (13 ns). Where the rank is a process, that is
memory without a name that the other ranks of its host may open: it outlives the process for as long as one of them has
it open, and no longer. So the last instruction of a process that was killed or stopped is known exactly.
"""

import mmap
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stagewright.schedules import Instruction
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.instructions import parse
from stagewright.schedules.windows import later

# The cells of the page: numbers of eight bytes.
INDEX, START, SIZE, STEP, LATER_MICROBATCHES, LATER_VERSIONS, PHASE, AWAITED, NUM_WAITS = range(9)
_NUM_CELLS: Final = 9
BEFORE, RUNNING, BETWEEN = range(3)
# Whom a rank waits for, beside the ranks of its pipeline, which count from 1 up.
NOBODY, REPLICAS = 0, -1

_TOKEN_SIZE: Final = 32
_PAGE_SIZE: Final = 4096
_LONGEST_STREAM: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is, or was last.

    Args:
        step: the step that it is in, or has ended; -1 before the first.
        instruction: what it does there; empty between steps.
    """

    step: int = -1
    instruction: str = ""

    def __str__(self) -> str:
        if self.instruction:
            return f"at {self.instruction} (step {self.step})"
        return "before its first step" if self.step < 0 else f"after step {self.step}"

    @property
    def last(self) -> str:
        """In a sentence, of a rank that can be asked no more."""
        if self.instruction:
            return f"its last instruction was {self.instruction} (step {self.step})"
        return "it had not begun its first step" if self.step < 0 else f"it had ended step {self.step}"


class Progress:
    """The page of this rank.

    Args:
        rank: it.
        shared: whether other processes may read it, where this system has such memory.
    """

    def __init__(self, rank: int, *, shared: bool = False) -> None:
        self.rank = rank
        self.replica = ""  # " of replica 1", where there are several
        self.token = secrets.token_bytes(_TOKEN_SIZE)
        self.num_batches = 0  # that were trained on; for words alone
        self.file = _make_file(self.token) if shared and sys.platform.startswith("linux") else None
        memory = bytearray(_PAGE_SIZE) if self.file is None else mmap.mmap(self.file, _PAGE_SIZE)
        self.cells = memoryview(memory)[_TOKEN_SIZE:].cast("q")
        self._end = _PAGE_SIZE
        self._streams: dict[int, Sequence[Instruction]] = {}

    @property
    def name(self) -> str:
        """This rank, in words."""
        return f"rank {self.rank}{self.replica}"

    def add(self, stream: Sequence[Instruction]) -> int:
        """Make a stream known that will run, and give its number."""
        text = ",".join(map(str, stream)).encode()
        start, self._end = self._end, self._end + max(len(text), 1)
        self._streams[start] = stream
        if self.file is not None:
            os.pwrite(self.file, text, start)
        return start

    def begin(self, stream: int, step: int, later_microbatches: int = 0, later_versions: int = 0) -> None:
        """A run of a stream begins."""
        cells = self.cells
        cells[PHASE] = BETWEEN
        cells[INDEX], cells[START], cells[SIZE], cells[STEP] = 0, stream, self._size_of(stream), step
        cells[LATER_MICROBATCHES], cells[LATER_VERSIONS] = later_microbatches, later_versions
        cells[PHASE] = RUNNING

    def end(self) -> None:
        """It has ended well."""
        self.cells[PHASE] = BETWEEN

    @property
    def place(self) -> Place:
        """Where this rank is."""
        index, start, _, step, microbatches, versions, phase, *_ = self.cells[:_NUM_CELLS].tolist()
        stream = self._streams.get(start, ())
        if phase != RUNNING or index >= len(stream):
            return Place(step if phase != BEFORE else -1)
        return Place(step, str(later(stream[index], microbatches, versions)))

    @property
    def snapshot(self) -> tuple[int, ...]:
        """The cells as they are: the same again later, if nothing has happened meanwhile."""
        return tuple(self.cells[:_NUM_CELLS].tolist())

    @property
    def awaited(self) -> int | None:
        """The rank that this one waits for now; REPLICAS for those of other replicas; None where for nobody."""
        awaited = self.cells[AWAITED]
        return awaited - 1 if awaited > 0 else awaited or None

    def await_rank(self, rank: int) -> None:
        """This rank begins to wait for another."""
        self.cells[AWAITED] = rank + 1 if rank >= 0 else rank

    def awaits_nobody(self) -> None:
        """It goes on."""
        cells = self.cells
        cells[AWAITED] = NOBODY
        cells[NUM_WAITS] += 1

    def close(self) -> None:
        """Let go of the memory, once nobody writes any more; whoever has opened it keeps it."""
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def _size_of(self, start: int) -> int:
        later_ones = [other for other in self._streams if other > start]
        return min(later_ones, default=self._end) - start


def open_page(process: int, file: int, token: bytes) -> int | None:
    """The page of another process of this host, open for reading; None where it cannot be had."""
    try:
        page = os.open(f"/proc/{process}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    if os.pread(page, _TOKEN_SIZE, 0) != token:  # processes are numbered otherwise over there
        os.close(page)
        return None
    return page


def read_place(page: int) -> Place:
    """Where the rank is that writes, or wrote, a page."""
    cells = memoryview(os.pread(page, 8 * _NUM_CELLS, _TOKEN_SIZE)).cast("q").tolist()
    index, start, size, step, microbatches, versions, phase, *_ = cells
    if phase != RUNNING or not 0 <= size <= _LONGEST_STREAM or min(index, start) < 0:
        return Place(step if phase != BEFORE else -1)
    try:
        tokens = os.pread(page, size, start).decode("ascii", "replace").split(",")
        return Place(step, str(later(parse(tokens[index]), microbatches, versions)))
    except (IndexError, OSError, ScheduleError):
        return Place(step)


def _make_file(token: bytes) -> int:
    file = os.memfd_create("stagewright progress", os.MFD_CLOEXEC)
    os.ftruncate(file, _PAGE_SIZE)
    os.pwrite(file, token, 0)
    return file
