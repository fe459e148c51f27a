"""The grid around an offence: a few instructions of the ranks nearby, the offending ones in brackets."""

from collections.abc import Sequence
from dataclasses import dataclass

from stagewright.schedules.instructions import Instruction
from stagewright.schedules.program import Program
from stagewright.schedules.table import FORWARD, OPERATIONS, RECEIVE_ACTIVATION, RECEIVE_GRADIENT, SEND_ACTIVATION

# Cells to either side of an offence, ranks to either side of its own, lines in all.
_REACH = 3
_RANKS = 2
_LINES = 10


@dataclass(frozen=True)
class Missing:
    """An instruction that should stand on a rank, about at this position of its stream, and does not."""

    rank: int
    position: int
    instruction: Instruction


def grid_around(program: Program, rows: Sequence[int], missing: Missing | None = None) -> str:
    """Draw a window of each rank's stream, one line a rank, centred on what concerns the same microbatch.

    ::

        rank 0 | … 0F1       0SEND_F1    [0F2]     0SEND_F2  0RECV_B0 …
        rank 1 | … 1RECV_F1  1F1         1SEND_F1  1RECV_F2  1F2      …

    Args:
        program: what the rows are rows of.
        rows: the rows to mark.
        missing: an instruction to draw where it should stand.
    """
    table = program.table
    marked = {(table.rank[row], table.position[row]) for row in rows}
    streams: list[Sequence[object]] = list(program.streams)
    if missing is not None:
        place = (missing.rank, missing.position)
        marked = {(rank, position + (rank == place[0] and position >= place[1])) for rank, position in marked} | {place}
        stream = program.streams[missing.rank]
        streams[missing.rank] = (*stream[: missing.position], f"{missing.instruction}?", *stream[missing.position :])
    subject = _subject(program, rows, missing)
    lines: list[tuple[int, list[str]]] = []
    for rank in _ranks_near(program, {rank for rank, _ in marked}):
        centres = sorted(position for other, position in marked if other == rank)
        for centre in _apart(centres) or [_counterpart(program, rank, subject)]:
            if streams[rank] and len(lines) < _LINES:
                lines.append(
                    (rank, _window(streams[rank], centre, {position for other, position in marked if other == rank}))
                )
    columns = [column for column in zip(*(cells for _, cells in lines)) if any(column)]
    widths = [max(map(len, column)) for column in columns]
    margin = max((len(str(rank)) for rank, _ in lines), default=1)
    return "\n".join(
        f"  rank {rank:>{margin}} | " + "  ".join(map(str.ljust, cells, widths)).rstrip()
        for (rank, _), cells in zip(lines, zip(*columns))
    )


def _window(stream: Sequence[object], centre: int, marked: set[int]) -> list[str]:
    """The cells around a position, with dots where the stream goes on."""
    cells = []
    for position in range(centre - _REACH, centre + _REACH + 1):
        text = str(stream[position]) if 0 <= position < len(stream) else ""
        cells.append(f"[{text}]" if position in marked else text)
    return ["…" if centre > _REACH else "", *cells, "…" if centre + _REACH + 1 < len(stream) else ""]


def _ranks_near(program: Program, ranks: set[int]) -> list[int]:
    """The ranks of the offence and those beside them."""
    return [rank for rank in range(program.num_ranks) if any(abs(rank - other) <= _RANKS for other in ranks)]


def _apart(positions: Sequence[int]) -> list[int]:
    """Of positions in rising order, those that no window around an earlier one shows."""
    centres: list[int] = []
    for position in positions:
        if not centres or position > centres[-1] + _REACH:
            centres.append(position)
    return centres


def _subject(program: Program, rows: Sequence[int], missing: Missing | None) -> tuple[bool, int, int, int]:
    """What an offence is about: whether it belongs to the forward pass, its stage, its microbatch, its position."""
    table = program.table
    if missing is not None:
        operation, position = OPERATIONS[type(missing.instruction)], missing.position
        stage, microbatch = getattr(missing.instruction, "stage", -1), getattr(missing.instruction, "microbatch", -1)
    else:
        row = rows[0]
        operation, position = table.operation[row], table.position[row]
        stage, microbatch = table.stage[row], table.microbatch[row]
    forward = operation in (FORWARD, SEND_ACTIVATION, RECEIVE_ACTIVATION)
    return forward, stage, microbatch if operation <= RECEIVE_GRADIENT else -1, position


def _counterpart(program: Program, rank: int, subject: tuple[bool, int, int, int]) -> int:
    """Where a rank does for the same microbatch what the offence is about; at the same position where it never does."""
    forward, stage, microbatch, position = subject
    table = program.table
    index = table.forward if forward else table.input_gradient
    if 0 <= microbatch < table.num_microbatches:
        for other in sorted(program.placement.stages_of(rank), key=lambda owned: abs(owned - stage)):
            row = index[other * table.num_microbatches + microbatch]
            if row >= 0 and table.rank[row] == rank:
                return table.position[row]
    return min(position, max(len(program.streams[rank]) - 1, 0))
