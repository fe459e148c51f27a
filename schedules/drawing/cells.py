"""Cells: what a picture shows of a timeline, whatever its format."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from stagewright.schedules.instructions import (
    Backward,
    Computation,
    Forward,
    InputGradient,
    Instruction,
    Overlap,
    SendActivation,
    SendGradient,
    Step,
    WeightGradient,
)
from stagewright.schedules.placement import Placement
from stagewright.schedules.timeline import Event, Timeline

KINDS: Final = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


@dataclass(frozen=True, slots=True)
class Part:
    """One computation: a whole cell, or half of a fused one.

    Args:
        kind: the letter of its instruction: F, B, I or W.
        stage, microbatch, version: as in the instruction.
        shade: the chunk of the rank that it belongs to, counted from 0; its direction in a bidirectional schedule.
    """

    kind: str
    stage: int
    microbatch: int
    version: int | None
    shade: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One instruction that takes time.

    Args:
        instruction: what is done.
        start, end: when.
        parts: the two computations of a fused pair, one otherwise, none of a STEP.
        why: what its rank waited for before it, in words; the empty string where it did not wait.
        cause: the (kind, stage, microbatch) of the computation on another rank that it waited for, if it was one.
    """

    instruction: Instruction
    start: float
    end: float
    parts: tuple[Part, ...]
    why: str = ""
    cause: tuple[str, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """The moment at which a new weight version was made, and how many cells of its rank precede it."""

    instruction: Step
    time: float
    position: int


@dataclass(frozen=True)
class Picture:
    """The cells and marks of every rank; times count from ``origin``, the first start on any rank.

    Args:
        rows: ``rows[rank]``: that rank's cells in order.
        marks: ``marks[rank]``: its STEPs in order.
        num_shades: shades that the parts distinguish.
        is_bidirectional: whether the shades are directions rather than chunks.
        origin: the time on the timeline's own clock that is 0 here.
    """

    rows: tuple[tuple[Cell, ...], ...]
    marks: tuple[tuple[Mark, ...], ...]
    num_shades: int
    is_bidirectional: bool
    origin: float

    @cached_property
    def end(self) -> float:
        """When the last cell ends."""
        return max((cell.end for row in self.rows for cell in row), default=0.0)

    @cached_property
    def parts(self) -> frozenset[tuple[str, int]]:
        """Every (kind, shade) that occurs."""
        return frozenset((part.kind, part.shade) for row in self.rows for cell in row for part in cell.parts)

    @cached_property
    def versions(self) -> tuple[int, ...]:
        """The weight versions that computations name, in rising order; empty where they name none."""
        named = {part.version for row in self.rows for cell in row for part in cell.parts}
        return tuple(sorted(version for version in named if version is not None))

    @cached_property
    def fuses(self) -> bool:
        """Whether there is a fused pair."""
        return any(len(cell.parts) == 2 for row in self.rows for cell in row)


def picture_of(timeline: Timeline) -> Picture:
    """Pick from a timeline what a picture shows: whatever takes time, and the STEPs."""
    placement = timeline.program.placement
    shades = Shades(placement)
    origin = min((event.start for events in timeline.events for event in events), default=0.0)
    rows, marks = [], []
    for rank, events in enumerate(timeline.events):
        row: list[Cell] = []
        steps: list[Mark] = []
        for event in events:
            parts = parts_of(event.instruction, rank, shades)
            start, end = event.start - origin, event.end - origin
            if isinstance(event.instruction, Step):
                steps.append(Mark(event.instruction, end, len(row)))
            if end > start and (parts or isinstance(event.instruction, Step)):
                row.append(Cell(event.instruction, start, end, parts, why(event, placement), cause(event)))
        rows.append(tuple(row))
        marks.append(tuple(steps))
    return Picture(tuple(rows), tuple(marks), shades.count, shades.is_bidirectional, origin)


def names_of(timeline: Timeline) -> list[str]:
    """What the rows of a picture are called."""
    return [f"rank {rank}" for rank in range(timeline.program.num_ranks)]


def why(event: Event, placement: Placement) -> str:
    """What an event waited for, in words such as ``waited 3 for 2SEND_F1 from rank 2``."""
    if event.waited <= 1e-9 * event.end:
        return ""
    words = f"waited {event.waited:g}"
    match event.waited_for:
        case None:
            return words
        case SendActivation(stage, microbatch) | SendGradient(stage, microbatch):
            return f"{words} for {event.waited_for} from rank {placement.rank_of(stage, microbatch)}"
        case _:
            return f"{words} for {event.waited_for}"


def cause(event: Event) -> tuple[str, int, int] | None:
    """The (kind, stage, microbatch) of the computation that sent what an event waited for."""
    if event.waited <= 1e-9 * event.end:
        return None
    match event.waited_for:
        case SendActivation(stage, microbatch):
            return "F", stage, microbatch
        case SendGradient(stage, microbatch):
            return "B", stage, microbatch
        case _:
            return None


class Shades:
    """The shade of every computation: chunks of a rank, or the directions of a bidirectional schedule."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        # Where every rank has one stage, the routes are those of replicas.
        self.is_bidirectional = len(placement.routes) > 1 and placement.num_chunks > 1
        self._chunk = {
            (rank, stage): chunk
            for rank in range(placement.num_ranks)
            for chunk, stage in enumerate(placement.stages_of(rank))
        }
        self.count = len(placement.routes) if self.is_bidirectional else placement.num_chunks

    def of(self, rank: int, stage: int, microbatch: int) -> int:
        """The shade of what a rank computes; 0 for a stage that the rank does not own."""
        if self.is_bidirectional:
            return self._placement.route_of(microbatch)
        return self._chunk.get((rank, stage), 0)


def parts_of(instruction: Instruction, rank: int, shades: Shades) -> tuple[Part, ...]:
    """The computations of an instruction: two of a fused pair, none of what does not compute."""
    computations: Sequence[Computation]
    match instruction:
        case Overlap(forward, backward):
            computations = (forward, backward)
        case Forward() | Backward() | InputGradient() | WeightGradient():
            computations = (instruction,)
        case _:
            computations = ()
    return tuple(
        Part(
            computation.mnemonic,
            computation.stage,
            computation.microbatch,
            computation.version,
            shades.of(rank, computation.stage, computation.microbatch),
        )
        for computation in computations
    )
