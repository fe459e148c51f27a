"""Windows: an asynchronous schedule cut into what a rank does a batch at a time.

An asynchronous schedule has no last instruction, so the engine runs it in pieces: one window a batch, and a drain
when nothing follows. A window posts the receives of its own computations alone; it would else wait for a batch that
may never come. Once the pipeline is full, one window is like the one before it but for its numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, TypeAlias

from stagewright.schedules.asynchronous import AsynchronousSchedule
from stagewright.schedules.communication import insert_communication
from stagewright.schedules.instructions import (
    Backward,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
)
from stagewright.schedules.program import Program

Stream: TypeAlias = tuple[Instruction, ...]

# Windows after which every further one is like the one before it: the pipeline is full in the second, and the version
# rule of the first batches has run out by then.
NUM_OPENING: Final = 4


@dataclass(frozen=True)
class Piece:
    """A window or a drain, for numbers that may lie behind: add these to its microbatches and versions.

    Args:
        streams: every rank's part.
        microbatches, versions: by how much this piece is later than its numbers say.
    """

    streams: tuple[Stream, ...]
    microbatches: int
    versions: int


@dataclass(frozen=True)
class Windows:
    """The pieces of an asynchronous schedule.

    Args:
        schedule: whose.
    """

    schedule: AsynchronousSchedule

    def window(self, batch: int, num_drained: int) -> Piece:
        """What all ranks do when they are given a batch.

        Args:
            batch: its number, from 0.
            num_drained: batches before the last drain.
        """
        start = min(num_drained, NUM_OPENING)
        index = min(batch - num_drained, NUM_OPENING)
        pieces = _pieces(self.schedule, start, NUM_OPENING + 2)
        return self._later(tuple(of_rank[index] for of_rank in pieces), batch - start - index)

    def drain(self, num_batches: int, num_drained: int) -> Piece:
        """What is left to do after ``num_batches`` batches, ``num_drained`` of which were drained before."""
        start = min(num_drained, NUM_OPENING)
        length = min(num_batches - num_drained, NUM_OPENING)
        pieces = _pieces(self.schedule, start, length)
        return self._later(tuple(of_rank[-1] for of_rank in pieces), num_batches - start - length)

    def program(self, num_batches: int) -> Program:
        """The windows of some batches and the drain after them, as one program."""
        schedule = self.schedule
        pieces = [self.window(batch, 0) for batch in range(num_batches)] + [self.drain(num_batches, 0)]
        streams = tuple(
            tuple(later(instruction, piece) for piece in pieces for instruction in piece.streams[rank])
            for rank in range(schedule.num_ranks)
        )
        return Program(streams, schedule.placement, schedule.num_microbatches, num_batches, schedule.update_rule)

    def _later(self, streams: tuple[Stream, ...], batches: int) -> Piece:
        microbatches = batches * self.schedule.num_microbatches
        return Piece(streams, microbatches, microbatches // self.schedule.microbatches_per_update)


def later(instruction: Instruction, piece: Piece) -> Instruction:
    """An instruction of a piece with the numbers that it really has."""
    numbers = {}
    microbatch, version = getattr(instruction, "microbatch", None), getattr(instruction, "version", None)
    if microbatch is not None:
        numbers["microbatch"] = microbatch + piece.microbatches
    if version is not None:
        numbers["version"] = version + piece.versions
    return replace(instruction, **numbers)


@lru_cache(maxsize=16)
def _pieces(schedule: AsynchronousSchedule, start: int, num_windows: int) -> tuple[tuple[Stream, ...], ...]:
    """For each rank its windows from batch ``start`` on, then its drain, with sends and receives."""
    end = start + num_windows
    computed = [
        [schedule.window(rank, batch, start) for batch in range(start, end)] + [schedule.drain(rank, end, start)]
        for rank in range(schedule.num_ranks)
    ]
    streams = tuple(tuple(item for piece in of_rank for item in piece) for of_rank in computed)
    whole = insert_communication(
        Program(streams, schedule.placement, schedule.num_microbatches, end, schedule.update_rule)
    )
    return tuple(_cut(stream, of_rank) for stream, of_rank in zip(whole.streams, computed))


def _cut(stream: Sequence[Instruction], pieces: Sequence[Sequence[Instruction]]) -> tuple[Stream, ...]:
    """Deal a rank's stream to its windows; a receive that was posted ahead of its consumer's window opens it."""
    window_of = {instruction: window for window, piece in enumerate(pieces) for instruction in piece}
    needed_in = {receive: window for instruction, window in window_of.items() for receive in _needs(instruction)}
    opening: list[list[Instruction]] = [[] for _ in pieces]
    body: list[list[Instruction]] = [[] for _ in pieces]
    current = 0
    for instruction in stream:
        current = window_of.get(instruction, current)
        needed = needed_in.get(instruction, current)
        (body if needed == current else opening)[needed].append(instruction)
    return tuple((*first, *rest) for first, rest in zip(opening, body))


def _needs(instruction: Instruction) -> list[Instruction]:
    """The receives that an instruction may wait for."""
    match instruction:
        case Forward(stage, microbatch):
            return [ReceiveActivation(stage, microbatch)]
        case Backward(stage, microbatch):
            return [ReceiveGradient(stage, microbatch)]
        case _:
            return []
