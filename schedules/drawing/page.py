"""The HTML page: a timeline that one can zoom, move and ask, with the memory of every rank below it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from stagewright.schedules.drawing.caption import caption_of, memory_unit
from stagewright.schedules.drawing.cells import Part, Picture, names_of, picture_of
from stagewright.schedules.drawing.legend import Entry, entries_of
from stagewright.schedules.drawing.palettes import Palette, hexadecimal, ink_on, palette_of
from stagewright.schedules.memory import MemoryCurve
from stagewright.schedules.timeline import Timeline


def html_text(timeline: Timeline, *, title: str = "", palette: str = "megatron") -> str:
    """Draw a timeline as one HTML page that needs nothing else.

    It zooms and moves along the time axis. What the pointer rests on says what it is, when it starts and ends, and
    what it waited for; under each rank is what it stashes in the course of time.

    Args:
        timeline: what to draw.
        title: the line above it.
        palette: ``megatron``, ``deepseek``, ``torch`` or ``colorblind``.

    Raises:
        ScheduleError: there is no such palette.
    """
    lanes = Lanes(picture_of(timeline), names_of(timeline), timeline.memory, memory_unit(timeline.costs))
    return html_of(lanes, caption_of(timeline), title=title, palette=palette)


@dataclass(frozen=True)
class Lanes:
    """What a page shows.

    Args:
        picture: its rows.
        names: what each row is called.
        memory: what stands below each.
        unit: of that.
    """

    picture: Picture
    names: Sequence[str]
    memory: Sequence[MemoryCurve]
    unit: str


def html_of(lanes: Lanes, caption: Sequence[str], *, title: str, palette: str) -> str:
    """Draw lanes as a page over some sentences; title and palette as for ``html_text``."""
    colors = palette_of(palette)
    data = json.dumps(_data(lanes, colors), separators=(",", ":"))
    return Template(_resource("page.html")).substitute(
        title=escape(title or "Pipeline schedule"),
        style=_resource("page.css"),
        legend="\n".join(map(_legend_item, entries_of(lanes.picture, colors))),
        unit=lanes.unit,
        caption=escape(" ".join(caption)),
        data=data,
        script=_resource("page.js"),
    )


def _resource(name: str) -> str:
    return (files("stagewright.schedules.drawing") / name).read_text("utf-8").strip()


def _data(lanes: Lanes, colors: Palette) -> dict[str, Any]:
    """All that the script draws; it takes the lists apart in the order in which they are made here."""
    picture = lanes.picture
    place = {
        ("F" if part.kind == "F" else "B", part.stage, part.microbatch): [rank, index]
        for rank, row in enumerate(picture.rows)
        for index, cell in enumerate(row)
        for part in cell.parts
        if part.kind != "W"
    }
    styles: dict[tuple[str, str], int] = {}
    ranks = []
    for name, row, marks, memory in zip(lanes.names, picture.rows, picture.marks, lanes.memory):
        cells = [
            [
                _time(cell.start),
                _time(cell.end),
                str(cell.instruction),
                [_part(part, picture, colors, styles) for part in cell.parts],
                cell.why,
                place.get(cell.cause) if cell.cause else None,
            ]
            for cell in row
        ]
        stash = [[_time(time - picture.origin), _time(value)] for time, value in zip(memory.times, memory.values)]
        steps = [[_time(mark.time), str(mark.instruction)] for mark in marks]
        ranks.append({"name": name, "cells": cells, "steps": steps, "stash": stash, "peak": memory.peak})
    return {"end": _time(picture.end), "unit": lanes.unit, "styles": list(styles), "ranks": ranks}


def _part(part: Part, picture: Picture, colors: Palette, styles: dict[tuple[str, str], int]) -> list[int | str]:
    """Number of its fill and ink, microbatch, and weight version where there are several."""
    color = colors.color_of(part, picture.num_shades)
    style = styles.setdefault((hexadecimal(color), hexadecimal(ink_on(color))), len(styles))
    version = str(part.version) if part.version is not None and len(picture.versions) > 1 else ""
    return [style, str(part.microbatch), version]


def _time(value: float) -> float:
    """A time or size without the noise of its last digits."""
    return float(f"{value:.9g}")


def _legend_item(entry: Entry) -> str:
    boxes = "".join(f'<i style="background:{hexadecimal(color)}"></i>' for color in entry.colors)
    if entry.sample == "fused":
        boxes = f'<b class="fused">{boxes}</b>'
    elif entry.sample == "step":
        boxes = '<i class="step"></i>'
    return f"<li>{boxes}<span>{escape(entry.words)}</span></li>"
