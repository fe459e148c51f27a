"""Windows: an asynchronous schedule cut into what a rank does a batch at a time.

An asynchronous schedule has no last instruction, so the engine runs it in pieces: one window a batch, and a drain
when nothing follows. A window posts the receives of its own computations alone; it would else wait for a batch that
may never come. Once the pipeline is full, one window is like the one before it but for its numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, TypeAlias

from stagewright.schedules.asynchronous import AsynchronousSchedule, Work
from stagewright.schedules.communication import insert_communication
from stagewright.schedules.instructions import (
    Backward,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    ReduceTied,
    Step,
    SyncScalars,
)
from stagewright.schedules.program import Program, UpdateRule

Stream: TypeAlias = tuple[Instruction, ...]

# Windows after which every further one is like the one before it: the pipeline is full in the second, and the version
# rule of the first batches has run out by then.
NUM_OPENING: Final = 4


@dataclass(frozen=True)
class Piece:
    """A window or a drain, for numbers that may lie behind: add these to its microbatches and versions.

    Args:
        name: tells it from every other piece of its schedule.
        streams: every rank's part.
        microbatches, versions: by how much this piece is later than its numbers say.
    """

    name: tuple[str, int, int]
    streams: tuple[Stream, ...]
    microbatches: int
    versions: int


@dataclass(frozen=True)
class Windows:
    """The pieces of an asynchronous schedule.

    Args:
        schedule: whose.
        tied_stages: stages that share a weight with another one.
        scalars: an update needs a value that depends on every rank, such as the gradient norm. Such a value is there
            only after the last backward of the batch on the first rank. So each rank tells its part as soon as it can,
            and its STEP moves to just before the first forward that reads the version (or the next scalars, or into the
            drain); the backwards in between need a second sum of gradients.
    """

    schedule: AsynchronousSchedule
    tied_stages: frozenset[int] = frozenset()
    scalars: bool = False

    @property
    def update_rule(self) -> UpdateRule:
        """The schedule's, with a second gradient buffer where STEPs wait for other ranks."""
        rule = self.schedule.update_rule
        return replace(rule, num_gradient_buffers=2) if self.scalars or self.tied_stages else rule

    def window(self, batch: int, num_drained: int) -> Piece:
        """What all ranks do when they are given a batch.

        Args:
            batch: its number, from 0.
            num_drained: batches before the last drain.
        """
        start = min(num_drained, NUM_OPENING)
        index = min(batch - num_drained, NUM_OPENING)
        pieces = _pieces(self, start, NUM_OPENING + 2)
        return self._piece("window", start, index, [of_rank[index] for of_rank in pieces], batch - start - index)

    def drain(self, num_batches: int, num_drained: int) -> Piece:
        """What is left to do after ``num_batches`` batches, ``num_drained`` of which were drained before."""
        start = min(num_drained, NUM_OPENING)
        length = min(num_batches - num_drained, NUM_OPENING)
        pieces = _pieces(self, start, length)
        return self._piece("drain", start, length, [of_rank[-1] for of_rank in pieces], num_batches - start - length)

    def program(self, drains: Sequence[int]) -> Program:
        """The windows of some batches and the drains among them, as one program.

        Args:
            drains: after how many batches, in all, each drain comes; the last one ends the program.
        """
        pieces, num_drained = [], 0
        for num_batches in drains:
            pieces += [self.window(batch, num_drained) for batch in range(num_drained, num_batches)]
            pieces.append(self.drain(num_batches, num_drained))
            num_drained = num_batches
        schedule = self.schedule
        streams = tuple(
            tuple(later(instruction, piece) for piece in pieces for instruction in piece.streams[rank])
            for rank in range(schedule.num_ranks)
        )
        return Program(streams, schedule.placement, schedule.num_microbatches, num_drained, self.update_rule)

    def _piece(self, kind: str, start: int, index: int, streams: Sequence[Stream], batches: int) -> Piece:
        microbatches = batches * self.schedule.num_microbatches
        versions = microbatches // self.schedule.microbatches_per_update
        return Piece((kind, start, index), tuple(streams), microbatches, versions)


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
def _pieces(windows: Windows, start: int, num_windows: int) -> tuple[tuple[Stream, ...], ...]:
    """For each rank its windows from batch ``start`` on, then its drain, with sends and receives."""
    schedule, end = windows.schedule, start + num_windows
    computed = [
        [schedule.window(rank, batch, start) for batch in range(start, end)] + [schedule.drain(rank, end, start)]
        for rank in range(schedule.num_ranks)
    ]
    if windows.scalars or windows.tied_stages:
        computed = [_put_off(of_rank, windows) for of_rank in computed]
    streams = tuple(tuple(item for piece in of_rank for item in piece) for of_rank in computed)
    whole = insert_communication(
        Program(streams, schedule.placement, schedule.num_microbatches, end, windows.update_rule)
    )
    return tuple(_cut(stream, of_rank) for stream, of_rank in zip(whole.streams, computed))


def _put_off(pieces: Sequence[Sequence[Work]], windows: Windows) -> list[list[Work]]:
    """In the place of each STEP tell the other ranks what they must know, and step later: before the version is read,
    or before there is something to tell of the next one."""
    waiting: list[Step] = []
    put_off: list[list[Work]] = []
    for piece in pieces:
        work: list[Work] = []
        for instruction in piece:
            if isinstance(instruction, Step):
                work += waiting
                waiting = [instruction]
                work += [ReduceTied(instruction.stage)] if instruction.stage in windows.tied_stages else []
                work += [SyncScalars()] if windows.scalars else []
                continue
            if isinstance(instruction, Forward):
                work += [step for step in waiting if step.version <= (instruction.version or 0)]
                waiting = [step for step in waiting if step.version > (instruction.version or 0)]
            work.append(instruction)
        put_off.append(work)
    put_off[-1] += waiting
    return put_off


def _cut(stream: Sequence[Instruction], pieces: Sequence[Sequence[Instruction]]) -> tuple[Stream, ...]:
    """Deal a rank's stream to its windows; a receive that was posted ahead of its consumer's window opens it."""
    work = [(window, instruction) for window, piece in enumerate(pieces) for instruction in piece]
    needed_in = {receive: window for window, instruction in work for receive in _needs(instruction)}
    opening: list[list[Instruction]] = [[] for _ in pieces]
    body: list[list[Instruction]] = [[] for _ in pieces]
    current, num_met = 0, 0
    for instruction in stream:
        if num_met < len(work) and instruction == work[num_met][1]:
            current, num_met = work[num_met][0], num_met + 1
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
