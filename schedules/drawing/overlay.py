"""The overlay: of every rank what was predicted and, below it, what was measured, on one axis."""

from collections.abc import Sequence
from dataclasses import replace

from stagewright.schedules.drawing.caption import memory_unit, shape_of
from stagewright.schedules.drawing.cells import Cell, Picture, picture_of
from stagewright.schedules.drawing.page import Lanes, html_of
from stagewright.schedules.drawing.svg import svg_of
from stagewright.schedules.timeline import Timeline


def overlay_svg(predicted: Timeline, measured: Timeline, *, title: str = "", palette: str = "megatron") -> str:
    """Draw two timelines of one program as SVG, as ``svg_text`` does one.

    Raises:
        ScheduleError: there is no such palette.
    """
    names, caption = _names(measured), _caption(predicted, measured)
    return svg_of(_woven(predicted, measured), names, caption, title=title, palette=palette)


def overlay_html(predicted: Timeline, measured: Timeline, *, title: str = "", palette: str = "megatron") -> str:
    """Draw two timelines of one program as an HTML page, as ``html_text`` does one.

    Raises:
        ScheduleError: there is no such palette.
    """
    memory = [curve for curves in zip(predicted.memory, measured.memory) for curve in curves]
    lanes = Lanes(_woven(predicted, measured), _names(measured), memory, memory_unit(measured.costs))
    return html_of(lanes, _caption(predicted, measured), title=title, palette=palette)


def _woven(predicted: Timeline, measured: Timeline) -> Picture:
    """The rows of both by turns."""
    upper, lower = picture_of(predicted), picture_of(measured)
    return Picture(
        tuple(row for rows in zip(map(_without_causes, upper.rows), lower.rows) for row in rows),
        tuple(marks for both in zip(upper.marks, lower.marks) for marks in both),
        lower.num_shades,
        lower.is_bidirectional,
        lower.origin,
    )


def _without_causes(row: Sequence[Cell]) -> tuple[Cell, ...]:
    """The cells of a row without arrows, which would lead to what was measured."""
    return tuple(replace(cell, cause=None) for cell in row)


def _names(timeline: Timeline) -> list[str]:
    return [name for rank in range(timeline.program.num_ranks) for name in (f"rank {rank}", "measured")]


def _caption(predicted: Timeline, measured: Timeline) -> list[str]:
    return [
        f"{shape_of(measured)}. Of each rank what was predicted and, below, what was measured.",
        f"Makespan {predicted.makespan:.6g} predicted, {measured.makespan:.6g} measured; bubble fraction "
        f"{predicted.bubble_fraction:.1%} and {measured.bubble_fraction:.1%} = idle / (ranks × makespan).",
    ]
