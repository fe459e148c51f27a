"""SVG: a timeline as the papers draw it, one row a rank."""

from collections.abc import Sequence
from math import floor
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from stagewright.schedules.drawing.caption import caption_of
from stagewright.schedules.drawing.cells import Cell, Mark, Part, Picture, names_of, picture_of
from stagewright.schedules.drawing.layout import MARGIN, NAME_SIZE, ROW, Layout, layout_of, round_step
from stagewright.schedules.drawing.legend import add_legend
from stagewright.schedules.drawing.palettes import Palette, ink_on, palette_of
from stagewright.schedules.drawing.shapes import (
    FAINT,
    INK,
    WHITE,
    add_line,
    add_rect,
    add_step,
    add_text,
    digits_width,
    number,
    text_width,
)
from stagewright.schedules.timeline import Timeline


def svg_text(timeline: Timeline, *, title: str = "", palette: str = "megatron") -> str:
    """Draw a timeline as SVG.

    The digit is the microbatch, the hue what is computed, the lightness the chunk, a tint and the small digit the
    weight version; idle time is white, a fused pair has one border, a triangle marks an optimizer step. What the
    pointer rests on says what it is. Numbers that do not fit their cell are left out.

    Args:
        timeline: what to draw.
        title: the line above it.
        palette: ``megatron``, ``deepseek``, ``torch`` or ``colorblind``.

    Raises:
        ScheduleError: there is no such palette.
    """
    return svg_of(picture_of(timeline), names_of(timeline), caption_of(timeline), title=title or "", palette=palette)


def svg_of(picture: Picture, names: Sequence[str], caption: Sequence[str], *, title: str, palette: str) -> str:
    """Draw the rows of a picture, each with its name, over some sentences; title and palette as for ``svg_text``."""
    colors = palette_of(palette)
    layout = layout_of(picture, MARGIN + (24 if title else 4), names)
    root = Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
    root.set("font-family", "Helvetica, Arial, 'DejaVu Sans', sans-serif")
    SubElement(root, "title").text = title or "Pipeline schedule"
    page = add_rect(root, 0, 0, 0, 0, WHITE)
    if title:
        add_text(root, MARGIN, MARGIN + 10, title, 14).set("font-weight", "bold")
    for rank, name in enumerate(names):
        _add_row(root, rank, name, picture, layout, colors)
    widths = [text_width(title, 15), *(text_width(sentence, 11) for sentence in caption)]
    right = max(layout.right, MARGIN + max(widths))
    bottom = _add_axis(root, picture, layout)
    bottom = add_legend(root, picture, colors, MARGIN, bottom + 10, right)
    for sentence in caption:
        bottom += 16
        add_text(root, MARGIN, bottom, sentence, 11)
    size = {"width": number(right + MARGIN), "height": number(bottom + MARGIN)}
    root.attrib.update(size, viewBox=f"0 0 {size['width']} {size['height']}")
    page.attrib.update(size)
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _add_row(root: Element, rank: int, name: str, picture: Picture, layout: Layout, colors: Palette) -> None:
    """One rank: its name, its idle time, its cells and its steps."""
    row = SubElement(root, "g", {"class": "rank"})
    y = layout.y(rank)
    add_text(row, MARGIN, y + ROW / 2 + 4, name, NAME_SIZE)
    add_rect(row, layout.left, y, picture.end * layout.scale, ROW, WHITE, FAINT)
    for cell in picture.rows[rank]:
        _add_cell(row, cell, y, picture, layout, colors)
    for mark in picture.marks[rank]:
        _add_mark(row, mark, y, layout)


def _add_cell(row: Element, cell: Cell, y: float, picture: Picture, layout: Layout, colors: Palette) -> None:
    """One instruction: a box for each of its computations, and one border around a fused pair."""
    x, width = layout.x(cell.start), (cell.end - cell.start) * layout.scale
    group = SubElement(row, "g")
    words = f"{cell.instruction}: {cell.start:g} to {cell.end:g}"
    SubElement(group, "title").text = f"{words}, {cell.why}" if cell.why else words
    if not cell.parts:
        add_rect(group, x, y, width, ROW, FAINT, INK)
    for index, part in enumerate(cell.parts):
        share = width / len(cell.parts)
        _add_part(group, part, x + index * share, y, share, picture, layout, colors)
    if len(cell.parts) == 2:
        border = add_rect(group, x, y, width, ROW, None, INK)
        border.attrib.update({"class": "fused", "stroke-width": "2"})


def _add_part(
    group: Element, part: Part, x: float, y: float, width: float, picture: Picture, layout: Layout, colors: Palette
) -> None:
    """One computation: its box with its microbatch, and with its weight version in small where there are several."""
    color = colors.color_of(part, picture.num_shades)
    add_rect(group, x, y, width, ROW, color, INK if width > 3 else None)
    if width < layout.number_width:
        return
    size = layout.number_size
    label = add_text(group, x + width / 2, y + ROW / 2 + size * 0.36, str(part.microbatch), size, color=ink_on(color))
    label.set("text-anchor", "middle")
    version = str(part.version) if part.version is not None and len(picture.versions) > 1 else ""
    needed = layout.number_width / 2 + digits_width(len(version), size * 0.7) + 2
    if version and needed <= width / 2:
        small = add_text(group, x + width - 1.5, y + size * 0.7 + 1, version, size * 0.7, color=ink_on(color))
        small.set("text-anchor", "end")


def _add_mark(row: Element, mark: Mark, y: float, layout: Layout) -> None:
    """An optimizer step: a bar through the row with a triangle on top."""
    group = SubElement(row, "g", {"class": "step"})
    SubElement(group, "title").text = f"{mark.instruction}: {mark.time:g}"
    add_step(group, layout.x(mark.time), y, ROW)


def _add_axis(root: Element, picture: Picture, layout: Layout) -> float:
    """The time axis below the rows; returns where it ends."""
    y = layout.y(len(picture.rows)) + 2
    axis = SubElement(root, "g", {"class": "axis"})
    add_line(axis, layout.left, y, layout.x(picture.end), y, INK)
    step = round_step(50 / layout.scale)
    for index in range(floor(picture.end / step * (1 + 1e-9)) + 1):
        x = layout.x(index * step)
        add_line(axis, x, y, x, y + 4, INK)
        add_text(axis, x, y + 15, f"{index * step:g}", 10).set("text-anchor", "middle")
    add_text(axis, MARGIN, y + 15, "time", 10)
    return y + 20
