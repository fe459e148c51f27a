"""Windows: an asynchronous schedule cut into what a rank does a batch at a time.

An asynchronous schedule has no last instruction, so the engine runs it in pieces: one window a batch, and a drain
when nothing follows. A window posts the receives of what is sent in the same window, and no others: those would wait
for a batch that may never come. Once the pipeline is full, one window is like the one before it but for its numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeAlias

from stagewright.schedules.communication import Messages, messages_of
from stagewright.schedules.instructions import (
    Backward,
    Forward,
    Instruction,
)
from stagewright.schedules.late_steps import Work, put_off, reduce_all
from stagewright.schedules.placement import Placement
from stagewright.schedules.program import Program, UpdateRule

Stream: TypeAlias = tuple[Instruction, ...]


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
        return self._window(batch, num_drained, self.num_opening + 2)

    def drain(self, num_batches: int, num_drained: int) -> Piece:
        """What is left to do after ``num_batches`` batches, ``num_drained`` of which were drained before."""
        start = min(num_drained, self.num_opening)
        length = min(num_batches - num_drained, self.num_opening)
        pieces = self._pieces(start, length)
        return self._piece("drain", start, length, [of_rank[-1] for of_rank in pieces], num_batches - start - length)

    def program(self, drains: Sequence[int]) -> Program:
        """The windows of some batches and the drains among them, as one program.

        Args:
            drains: after how many batches, in all, each drain comes; the last one ends the program.
        """
        pieces, num_drained = [], 0
        for num_batches in drains:
            # What a window is does not depend on any but the next one: no more than that need be made.
            length = min(num_batches - num_drained + 1, self.num_opening + 2)
            pieces += [self._window(batch, num_drained, length) for batch in range(num_drained, num_batches)]
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

    def _window(self, batch: int, num_drained: int, length: int) -> Piece:
        start = min(num_drained, self.num_opening)
        index = min(batch - num_drained, self.num_opening)
        pieces = self._pieces(start, length)
        return self._piece("window", start, index, [of_rank[index] for of_rank in pieces], batch - start - index)

    def _pieces(self, start: int, num_windows: int) -> Sequence[Sequence[Stream]]:
        """For each rank its windows from batch ``start`` on, then its drain, with sends and receives."""
        if (start, num_windows) not in self._made:
            self._made[start, num_windows] = self._make_pieces(start, num_windows)
        return self._made[start, num_windows]

    @cached_property
    def _made(self) -> dict[tuple[int, int], Sequence[Sequence[Stream]]]:
        return {}

    def _make_pieces(self, start: int, num_windows: int) -> Sequence[Sequence[Stream]]:
        schedule, end = self.schedule, start + num_windows
        at_once = [
            [schedule.window(rank, batch, start) for batch in range(start, end)] + [schedule.drain(rank, end, start)]
            for rank in range(schedule.num_ranks)
        ]
        if self.data_parallel:
            at_once = [[reduce_all(piece) for piece in of_rank] for of_rank in at_once]
        computed = [put_off(of_rank, self.tied_stages, self.scalars) for of_rank in at_once]
        streams = tuple(tuple(item for piece in of_rank for item in piece) for of_rank in computed)
        whole = Program(streams, schedule.placement, schedule.num_microbatches, end, self.update_rule)
        messages = messages_of(whole)
        window_of = [window for of_rank in computed for window, piece in enumerate(of_rank) for _ in piece]
        return [_cut(of_rank, first, messages, window_of) for of_rank, first in zip(computed, whole.table.first_row)]

    def _piece(self, kind: str, start: int, index: int, streams: Sequence[Stream], batches: int) -> Piece:
        microbatches = batches * self.schedule.num_microbatches
        versions = microbatches // self.schedule.microbatches_per_update
        return Piece((kind, start, index), tuple(streams), microbatches, versions)


def later(instruction: Instruction, microbatches: int, versions: int) -> Instruction:
    """The same instruction with higher numbers."""
    if not microbatches and not versions:
        return instruction
    numbers = {}
    microbatch, version = getattr(instruction, "microbatch", None), getattr(instruction, "version", None)
    if microbatch is not None:
        numbers["microbatch"] = microbatch + microbatches
    if version is not None:
        numbers["version"] = version + versions
    return replace(instruction, **numbers)


def _is_full(window: Sequence[Work]) -> bool:
    """Whether a window has a backward for each forward."""
    num_forwards = sum(isinstance(instruction, Forward) for instruction in window)
    return num_forwards == sum(isinstance(instruction, Backward) for instruction in window)


def _cut(
    pieces: Sequence[Sequence[Instruction]], row: int, messages: Messages, window_of: Sequence[int]
) -> tuple[Stream, ...]:
    """A rank's windows, from its first row on, with each receive in the one in which its message is sent.

    There it stands where it stood, or at the start or the end, if that was in an earlier or a later window. So what is
    sent in a window is received in it, whether a drain follows or another window.
    """
    opening, body, closing = ([list[Instruction]() for _ in pieces] for _ in range(3))
    for window, piece in enumerate(pieces):
        for instruction in piece:
            for sent in messages.before.get(row, ()):
                needed = window_of[sent]
                part = body if needed == window else opening if needed > window else closing
                part[needed].append(messages.receive(sent))
            body[window].append(instruction)
            if row in messages.sent:
                body[window].append(messages.send(row))
            row += 1
    return tuple((*first, *rest, *last) for first, rest, last in zip(opening, body, closing))
