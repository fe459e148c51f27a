"""The text grid: one line a rank, one column a tick."""

from collections.abc import Sequence
from math import isclose

from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.instructions import Backward, Forward, InputGradient, Instruction, Overlap, WeightGradient
from stagewright.schedules.timeline import Event, Timeline

_LETTERS = {Forward: "F", InputGradient: "I", WeightGradient: "W", Backward: "B"}


def grid_text(timeline: Timeline) -> str:
    """Draw a timeline as plain text.

    ``F3`` is a forward, ``B3`` a full backward, ``I3`` and ``W3`` its halves, ``F3&B1`` a fused pair; ``--`` goes
    on with the instruction to its left, ``..`` is idle. Where a rank owns several stages, its second chunk is
    in small letters, and from the third on the stage stands in front (``7F3``).
    """
    rows = [
        [
            (event, label(event.instruction, timeline.program.placement.stages_of(rank)))
            for event in events
            if label(event.instruction, ())
        ]
        for rank, events in enumerate(timeline.events)
    ]
    tick = tick_of([event for row in rows for event, _ in row])
    width = max((len(text) for row in rows for _, text in row), default=2)
    num_ticks = round(timeline.makespan / tick)
    start = min(event.start for row in rows for event, _ in row)
    lines = []
    for rank, row in enumerate(rows):
        cells = ["." * min(width, 2)] * num_ticks
        for event, text in row:
            first, end = round((event.start - start) / tick), round((event.end - start) / tick)
            cells[first:end] = [text] + ["--"] * (end - first - 1)
        lines.append(f"rank {rank}  " + " ".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def label(instruction: Instruction, stages: Sequence[int]) -> str:
    """What a cell shows of a computation, the empty string for everything else."""
    match instruction:
        case Forward() | Backward() | InputGradient() | WeightGradient():
            letter = _LETTERS[type(instruction)]
            chunk = stages.index(instruction.stage) if instruction.stage in stages else 0
            if chunk == 0:
                return f"{letter}{instruction.microbatch}"
            return f"{letter.lower()}{instruction.microbatch}" if chunk == 1 and len(stages) == 2 else str(instruction)
        case Overlap(forward, backward):
            return f"{label(forward, stages)}&{label(backward, stages)}"
        case _:
            return ""


def tick_of(events: Sequence[Event]) -> float:
    """The longest tick of which all starts and ends are multiples.

    Raises:
        ScheduleError: there is none that a picture in text could show.
    """
    times = sorted({round(time, 9) for event in events for time in (event.start, event.end)} - {0.0})
    tick = times[0] if times else 1.0
    for time in times:
        rest = time
        while rest > 1e-6 and not isclose(rest, tick, abs_tol=1e-6):
            tick, rest = min(tick, rest), abs(rest - tick) if rest > tick else tick - rest
            if tick < 1e-3 * times[-1]:
                raise ScheduleError("the times have no common tick that text could show; draw it as svg or html")
    return tick
