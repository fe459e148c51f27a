"""The text grid: one line a rank, one column a tick."""

from dataclasses import dataclass
from statistics import median
from typing import Final

from stagewright.schedules.drawing.cells import Cell, Part, Picture, picture_of
from stagewright.schedules.instructions import Step
from stagewright.schedules.timeline import Timeline

# Where the shortest or the longest cell would take more ticks than these, a grid is drawn to scale instead.
_MOST_TICKS_OF_SHORTEST: Final = 3
_MOST_TICKS_OF_LONGEST: Final = 8
# Characters that a cell of middling length gets at most where a grid is drawn to scale.
_WIDEST: Final = 12


@dataclass(frozen=True, slots=True)
class Span:
    """Some characters of a line, from column ``start`` on: a cell's, or idle time's where ``cell`` is None."""

    start: int
    text: str
    cell: Cell | None


@dataclass(frozen=True)
class Grid:
    """A text grid before its characters are joined.

    Args:
        rows: ``rows[rank]``: that rank's spans from left to right.
        pitch: characters of one tick with the space after it; lines are best broken at a multiple of it.
    """

    rows: tuple[tuple[Span, ...], ...]
    pitch: int

    def lines(self) -> list[str]:
        """One line a rank, without its name."""
        lines = []
        for row in self.rows:
            line = ""
            for span in row:
                line = line.ljust(span.start) + span.text
            lines.append(line)
        return lines


def grid_text(timeline: Timeline, *, versions: bool = False) -> str:
    """Draw a timeline as plain text.

    ``F3`` is a forward, ``B3`` a full backward, ``I3`` and ``W3`` its halves, ``F3&B1`` a fused pair, ``S1`` an
    optimizer step that takes time; ``--`` goes on with the instruction to its left, ``..`` is idle, and ``|`` stands
    where a step that takes no time is made. Where a rank owns two stages, the second is in small letters, and so is the
    second direction of a bidirectional schedule; where it owns more, the stage stands in front (``7F3``). Times that
    have no common tick are drawn to scale.

    Args:
        timeline: what to draw.
        versions: add the weight version to each computation (``F3@1``), where it names one.
    """
    grid = grid_of(picture_of(timeline), versions=versions)
    names = rank_names(len(grid.rows))
    return "\n".join(f"{name}  {line}".rstrip() for name, line in zip(names, grid.lines()))


def rank_names(num_ranks: int) -> list[str]:
    """``rank 0``, ``rank 1``, …, all of one width."""
    width = len(str(num_ranks - 1))
    return [f"rank {rank:{width}}" for rank in range(num_ranks)]


def grid_of(picture: Picture, *, versions: bool = False) -> Grid:
    """Lay a picture out in columns of characters."""
    labels = {cell: label(cell, picture, versions=versions) for row in picture.rows for cell in row}
    tick = tick_of(picture)
    if tick is None:
        return _to_scale(picture, labels)
    pitch = 2
    for cell, text in labels.items():
        num_ticks = round((cell.end - cell.start) / tick)
        pitch = max(pitch, -(-(len(text) + 1) // num_ticks) - 1)
    pitch += 1
    rows = []
    for row, breaks in zip(picture.rows, _breaks(picture)):
        spans = []
        reached = 0
        for cell in row:
            first, end = round(cell.start / tick), round(cell.end / tick)
            spans += [Span(column * pitch, "..", None) for column in range(reached, first)]
            spans.append(Span(first * pitch, _filled(labels[cell], end - first, pitch), cell))
            if cell in breaks:
                spans.append(Span(end * pitch - 1, "|", None))
            reached = end
        spans += [Span(column * pitch, "..", None) for column in range(reached, round(picture.end / tick))]
        rows.append(tuple(spans))
    return Grid(tuple(rows), pitch)


def _filled(text: str, num_ticks: int, pitch: int) -> str:
    """A label over its ticks, with ``--`` in each tick that the label leaves free; as wide as all of them."""
    used = -(-(len(text) + 1) // pitch)
    return (text.ljust(used * pitch) + "--".ljust(pitch) * (num_ticks - used))[:-1]


def _to_scale(picture: Picture, labels: dict[Cell, str]) -> Grid:
    """Columns for times without a common tick: wide enough for every label, but for those of very short cells."""
    needed = max((len(text) + 1) / (cell.end - cell.start) for cell, text in labels.items())
    typical = median(cell.end - cell.start for cell in labels)
    scale = min(needed, _WIDEST / typical)
    rows = []
    for row, breaks in zip(picture.rows, _breaks(picture)):
        spans = []
        reached = 0
        for cell in row:
            first, end = round(cell.start * scale), round(cell.end * scale)
            spans.append(Span(reached, "." * (first - reached - 1), None))
            if end > first:
                spans.append(Span(first, _fitted(labels[cell], end - first), cell))
            if cell in breaks and end - first > 1:
                spans.append(Span(end - 1, "|", None))
            reached = end
        last = round(picture.end * scale)
        spans.append(Span(reached, "." * (last - reached - 1), None))
        rows.append(tuple(spans))
    return Grid(tuple(rows), 1)


def _fitted(text: str, num_columns: int) -> str:
    """A label and dashes, less one column for the space after it; the bare letter where the label does not fit."""
    room = max(num_columns - 1, 1)
    return (text if len(text) <= room else text[:1]).ljust(room, "-")


def label(cell: Cell, picture: Picture, *, versions: bool) -> str:
    """What a cell shows: letter and microbatch of each of its computations."""
    if isinstance(cell.instruction, Step):
        return f"S{cell.instruction.version}"
    return "&".join(_part_label(part, picture, versions=versions) for part in cell.parts)


def _part_label(part: Part, picture: Picture, *, versions: bool) -> str:
    names_stage = picture.num_shades > 2 and not picture.is_bidirectional
    stage = part.stage if names_stage else ""
    letter = part.kind.lower() if part.shade % 2 and not names_stage else part.kind
    version = f"@{part.version}" if versions and part.version is not None else ""
    return f"{stage}{letter}{part.microbatch}{version}"


def _breaks(picture: Picture) -> list[set[Cell]]:
    """Of each rank, the cells after which a step takes no time before the next cell."""
    breaks = []
    for row, marks in zip(picture.rows, picture.marks):
        positions = {mark.position for mark in marks} & set(range(1, len(row)))
        breaks.append({row[position - 1] for position in positions if row[position].parts})
    return breaks


def tick_of(picture: Picture) -> float | None:
    """The tick of which all starts and ends are multiples, if no cell takes too many of them."""
    cells = [cell for row in picture.rows for cell in row]
    durations = {cell.end - cell.start for cell in cells} or {1.0}
    times = {time for cell in cells for time in (cell.start, cell.end)}
    for num_ticks in range(1, _MOST_TICKS_OF_SHORTEST + 1):
        tick = min(durations) / num_ticks
        if max(durations) > (_MOST_TICKS_OF_LONGEST + 0.5) * tick:
            return None
        if all(abs(time / tick - round(time / tick)) < 1e-3 for time in times):
            return tick
    return None
