"""`stagewright list`, and what `stagewright show` prints: schedules to look at in a terminal."""

from typing import Final

from rich.console import Console
from rich.text import Text

from stagewright.cli.grid import grid_rich
from stagewright.schedules import Schedule, Timeline, find, names
from stagewright.schedules.drawing.caption import shape_of
from stagewright.schedules.drawing.cells import KINDS, Picture, picture_of
from stagewright.schedules.drawing.palettes import Palette

# What a formula speaks of.
SPANS: Final = {"makespan": "makespan", "span": "per-rank span", "steady": "steady period"}


def list_schedules(console: Console) -> None:
    """Print every schedule's name and what it is, one line each."""
    width = max(map(len, names()))
    for name in names():
        line = Text.assemble((name.ljust(width), "bold"), "  ", find(name).summary)
        console.print(line, soft_wrap=True)


def show_schedule(console: Console, schedule: Schedule, timeline: Timeline, palette: Palette) -> None:
    """Print a schedule's grid under its name, a key, and what the simulation says of it.

    The palette is for terminals that can show it; others get colours that every terminal has, a pipe gets none.
    """
    picture = picture_of(timeline)
    has_versions = len(picture.versions) > 1
    shown = palette if console.color_system in ("256", "truecolor") else None
    panels = grid_rich(timeline, console.width if console.is_terminal else None, shown, versions=has_versions)
    title = Text.assemble((schedule.name, "bold"), f": {schedule.summary}\n{shape_of(timeline)}")
    for part in (title, *panels, Text(key_of(picture), style="dim")):
        console.print(part, "\n", sep="", soft_wrap=True)
    rows = figures(schedule, timeline)
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(2)]
    for name, value, meaning in rows:
        line = f"{name.ljust(widths[0])}{value.ljust(widths[1])}{meaning}"
        console.print(line.rstrip(), highlight=False, soft_wrap=True)


def key_of(picture: Picture) -> str:
    """What the letters of a grid mean: no more than occurs in it."""
    kinds = [f"{letter} {words}" for letter, words in KINDS.items() if any(letter == kind for kind, _ in picture.parts)]
    parts = [*kinds, "-- goes on", ".. idle"]
    if picture.fuses:
        parts.append("& fused pair")
    if picture.num_shades == 2 or picture.is_bidirectional:
        parts.append(f"small letters: second {'direction' if picture.is_bidirectional else 'chunk'}")
    elif picture.num_shades > 2:
        parts.append("in front: the stage")
    if any(0 < mark.position < len(row) for row, marks in zip(picture.rows, picture.marks) for mark in marks):
        parts.append("| optimizer step")
    if len(picture.versions) > 1:
        parts.append("@ weight version")
    return "   ".join(parts)


def figures(schedule: Schedule, timeline: Timeline) -> list[tuple[str, str, str]]:
    """Name, value and meaning of makespan, bubbles and peak stash: each with its unit or denominator."""
    rows = [
        ("makespan", f"{timeline.makespan:g}", ""),
        ("bubble fraction", f"{timeline.bubble_fraction:.4f}", "idle / (ranks x makespan)"),
        ("bubble overhead", f"{timeline.bubble_overhead:.4f}", "(makespan - ideal) / ideal"),
        ("span bubble", f"{timeline.span_bubble:.4f}", "(span - ideal) / span: without an optimizer barrier"),
    ]
    if schedule.synchronous or timeline.program.num_batches > 2:
        meaning = f"(period - ideal) / period: batches follow each other every {timeline.steady_period:g}"
        rows.append(("steady bubble", f"{timeline.steady_bubble:.4f}", meaning))
    formula = schedule.bubble_formula(timeline.costs)
    if formula is not None:
        rows.append(
            ("by the formula", f"{formula.fraction:.4f}", f"{formula.text} idle, of the {SPANS[formula.measure]}")
        )
    stashes = " ".join(map(str, timeline.peak_stash))
    return [*rows, ("peak stash", stashes, "microbatches of one stage, by rank")]
