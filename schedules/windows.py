"""Windows: an asynchronous schedule cut into what a rank does a batch at a time.

An asynchronous schedule has no last instruction, so the engine runs it in pieces: one window a batch, and a drain
when nothing follows. A window posts the receives of what is sent in the same window, and no others: those would wait
for a batch that may never come. Once the pipeline is full, one window is like the one before it but for its numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol, TypeAlias

from stagewright.schedules.communication import insert_communication
from stagewright.schedules.instructions import (
    Backward,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    ReduceGradient,
    ReduceTied,
    SendActivation,
    SendGradient,
    Step,
    SyncScalars,
)
from stagewright.schedules.placement import Placement
from stagewright.schedules.program import Program, UpdateRule

Stream: TypeAlias = tuple[Instruction, ...]
Work: TypeAlias = Forward | Backward | Step | ReduceGradient | ReduceTied | SyncScalars


class Endless(Protocol):
    """What windows are cut from: an order of work that goes on from batch to batch."""

    @property
    def name(self) -> str:
        """Tells it from other schedules."""
        ...

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline, P."""
        ...

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one batch, M."""
        ...

    @property
    def microbatches_per_update(self) -> int:
        """Microbatches whose gradients go into one update."""
        ...

    @property
    def placement(self) -> Placement:
        """Which rank owns which stage."""
        ...

    @property
    def update_rule(self) -> UpdateRule:
        """When weights change, and how many versions of them are kept."""
        ...

    def window(self, rank: int, batch: int, num_drained: int = 0) -> Sequence[Work]:
        """What a rank does when it is given a batch, without communication."""
        ...

    def drain(self, rank: int, num_batches: int, num_drained: int = 0) -> Sequence[Work]:
        """What a rank still has to do after some batches."""
        ...


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
            drain); the backwards in between need a second sum of gradients. The same goes for sums over stages and
            over replicas.
        data_parallel: the gradients of all stages are summed over replicas of the whole pipeline.
    """

    schedule: Endless
    tied_stages: frozenset[int] = frozenset()
    scalars: bool = False
    data_parallel: bool = False

    @property
    def update_rule(self) -> UpdateRule:
        """The schedule's, with a second gradient buffer where STEPs wait for other ranks."""
        rule, placement = self.schedule.update_rule, self.schedule.placement
        replicated = any(len(placement.replicas_of(stage)) > 1 for stage in range(placement.num_stages))
        wait = self.scalars or self.tied_stages or replicated or self.data_parallel
        return replace(rule, num_gradient_buffers=2) if wait else rule

    @cached_property
    def num_opening(self) -> int:
        """Windows after which every further one is like the one before it.

        Once a window has as many backwards as forwards on the first rank, the pipeline is full; after as many again
        gradients come back in the rhythm of the activations, and after two more the first batches' version rule has
        run out.
        """
        num_filling = 0
        while not all(_is_full(self.schedule.window(rank, num_filling)) for rank in range(self.schedule.num_ranks)):
            num_filling += 1
        return 2 * num_filling + 2

    def window(self, batch: int, num_drained: int) -> Piece:
        """What all ranks do when they are given a batch.

        Args:
            batch: its number, from 0.
            num_drained: batches before the last drain.
        """
        start = min(num_drained, self.num_opening)
        index = min(batch - num_drained, self.num_opening)
        pieces = _pieces(self, start, self.num_opening + 2)
        return self._piece("window", start, index, [of_rank[index] for of_rank in pieces], batch - start - index)

    def drain(self, num_batches: int, num_drained: int) -> Piece:
        """What is left to do after ``num_batches`` batches, ``num_drained`` of which were drained before."""
        start = min(num_drained, self.num_opening)
        length = min(num_batches - num_drained, self.num_opening)
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
            tuple(
                later(instruction, piece.microbatches, piece.versions)
                for piece in pieces
                for instruction in piece.streams[rank]
            )
            for rank in range(schedule.num_ranks)
        )
        return Program(streams, schedule.placement, schedule.num_microbatches, num_drained, self.update_rule)

    def _piece(self, kind: str, start: int, index: int, streams: Sequence[Stream], batches: int) -> Piece:
        microbatches = batches * self.schedule.num_microbatches
        versions = microbatches // self.schedule.microbatches_per_update
        return Piece((kind, start, index), tuple(streams), microbatches, versions)


def later(instruction: Instruction, microbatches: int, versions: int) -> Instruction:
    """The same instruction with higher numbers."""
    numbers = {}
    microbatch, version = getattr(instruction, "microbatch", None), getattr(instruction, "version", None)
    if microbatch is not None:
        numbers["microbatch"] = microbatch + microbatches
    if version is not None:
        numbers["version"] = version + versions
    return replace(instruction, **numbers)


@lru_cache(maxsize=16)
def _pieces(windows: Windows, start: int, num_windows: int) -> tuple[tuple[Stream, ...], ...]:
    """For each rank its windows from batch ``start`` on, then its drain, with sends and receives."""
    schedule, end = windows.schedule, start + num_windows
    at_once = [
        [schedule.window(rank, batch, start) for batch in range(start, end)] + [schedule.drain(rank, end, start)]
        for rank in range(schedule.num_ranks)
    ]
    if windows.data_parallel:
        at_once = [[_reduce_all(piece) for piece in of_rank] for of_rank in at_once]
    computed = [_put_off(of_rank, windows) for of_rank in at_once]
    streams = tuple(tuple(item for piece in of_rank for item in piece) for of_rank in computed)
    whole = insert_communication(
        Program(streams, schedule.placement, schedule.num_microbatches, end, windows.update_rule)
    )
    sent_in = {
        receive: window
        for stream, of_rank in zip(whole.streams, computed)
        for instruction, window in zip(stream, _windows_of(stream, of_rank))
        if (receive := _receive_of(instruction)) is not None
    }
    return tuple(_cut(stream, of_rank, sent_in) for stream, of_rank in zip(whole.streams, computed))


def _is_full(window: Sequence[Work]) -> bool:
    """Whether a window has a backward for each forward."""
    num_forwards = sum(isinstance(instruction, Forward) for instruction in window)
    return num_forwards == sum(isinstance(instruction, Backward) for instruction in window)


def _reduce_all(piece: Sequence[Work]) -> list[Work]:
    """Sum the gradients of every stage that an update steps, before the first of its STEPs."""
    steps = [instruction for instruction in piece if isinstance(instruction, Step)]
    work: list[Work] = []
    reduced: set[int] = set()
    version = 0
    for instruction in piece:
        match instruction:
            case ReduceGradient(stage):
                reduced.add(stage)
            case Step() if instruction.version > version:
                version = instruction.version
                stages = [step.stage for step in steps if step.version == version and step.stage not in reduced]
                work += map(ReduceGradient, reversed(stages))
                reduced = set()
        work.append(instruction)
    return work


def _put_off(pieces: Sequence[Sequence[Work]], windows: Windows) -> list[list[Work]]:
    """In the place of STEPs that need other ranks tell those what they must know, and step later: before the version is
    read, or before there is something to tell of the next one."""
    tied = [stage for stage in _stages_of(pieces) if stage in windows.tied_stages]
    reduces = any(isinstance(instruction, ReduceGradient) for piece in pieces for instruction in piece)
    if not tied and not windows.scalars and not reduces:
        return [list(piece) for piece in pieces]
    waiting: list[Step] = []
    put_off: list[list[Work]] = []
    for piece in pieces:
        work: list[Work] = []
        for instruction in piece:
            match instruction:
                case ReduceGradient():
                    work += [*waiting, instruction]
                    waiting = []
                case Step(_, version) if waiting and waiting[-1].version == version:
                    waiting.append(instruction)
                case Step():
                    work += [*waiting, *map(ReduceTied, tied)]
                    work += [SyncScalars()] if windows.scalars else []
                    waiting = [instruction]
                case Forward(_, _, int(version)) if waiting and waiting[-1].version <= version:
                    work += [*waiting, instruction]
                    waiting = []
                case _:
                    work.append(instruction)
        put_off.append(work)
    put_off[-1] += waiting
    return put_off


def _stages_of(pieces: Sequence[Sequence[Work]]) -> list[int]:
    """The stages that a rank updates."""
    return sorted({instruction.stage for piece in pieces for instruction in piece if isinstance(instruction, Step)})


def _cut(
    stream: Sequence[Instruction], pieces: Sequence[Sequence[Instruction]], sent_in: Mapping[Instruction, int]
) -> tuple[Stream, ...]:
    """Deal a rank's stream to its windows, each receive to that in which its message is sent.

    There it stands where it stood, or at the start or the end, if that was in an earlier or a later window. So what is
    sent in a window is received in it, whether a drain follows or another window.
    """
    opening, body, closing = ([list[Instruction]() for _ in pieces] for _ in range(3))
    for instruction, window in zip(stream, _windows_of(stream, pieces)):
        needed = sent_in.get(instruction, window)
        part = body if needed == window else opening if needed > window else closing
        part[needed].append(instruction)
    return tuple((*first, *rest, *last) for first, rest, last in zip(opening, body, closing))


def _windows_of(stream: Sequence[Instruction], pieces: Sequence[Sequence[Instruction]]) -> list[int]:
    """The window of each instruction of a stream: that of the computation or update which it is or follows."""
    work = [(window, instruction) for window, piece in enumerate(pieces) for instruction in piece]
    windows: list[int] = []
    current, num_met = 0, 0
    for instruction in stream:
        if num_met < len(work) and instruction == work[num_met][1]:
            current, num_met = work[num_met][0], num_met + 1
        windows.append(current)
    return windows


def _receive_of(instruction: Instruction) -> Instruction | None:
    """The receive of a message that an instruction sends, if it does."""
    match instruction:
        case SendActivation(stage, microbatch):
            return ReceiveActivation(stage + 1, microbatch)
        case SendGradient(stage, microbatch):
            return ReceiveGradient(stage - 1, microbatch)
        case _:
            return None
