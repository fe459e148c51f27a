"""The text grid in the terminal: in colour, and no wider than it."""

from rich.style import Style
from rich.text import Text

from stagewright.schedules import Timeline
from stagewright.schedules.drawing.cells import Part, Picture, picture_of
from stagewright.schedules.drawing.palettes import Palette, hexadecimal, ink_on
from stagewright.schedules.drawing.text import Grid, Span, grid_of, rank_names

BASIC_HUES = {"F": "blue", "B": "green", "I": "cyan", "W": "yellow"}


def grid_rich(
    timeline: Timeline, width: int | None = None, palette: Palette | None = None, *, versions: bool = False
) -> list[Text]:
    """Draw `grid_text`, letter by letter, in colour: the hue tells the kind, the lightness the chunk.

    Without a palette, the colours are those that every terminal has. A grid wider than `width` is broken between two
    ticks into panels, to be read one after the other. `versions` is as in `grid_text`.
    """
    picture = picture_of(timeline)
    grid = grid_of(picture, versions=versions)
    names = rank_names(len(grid.rows))
    lines = [coloured(row, line, picture, palette) for row, line in zip(grid.rows, grid.lines())]
    panels = []
    for start, end in breaks(grid, max(map(len, lines)), None if width is None else width - len(names[0]) - 2):
        rows = [Text.assemble(name, "  ", line[start:end]) for name, line in zip(names, lines)]
        for row in rows:
            row.rstrip()
        panels.append(Text("\n").join(rows))
    return panels


def coloured(row: tuple[Span, ...], line: str, picture: Picture, palette: Palette | None) -> Text:
    """Paint one rank's line; the two halves of a fused pair meet before the `&`."""
    text = Text(line)
    for span in row:
        end = span.start + len(span.text)
        if span.cell is None:
            text.stylize("dim", span.start, end)
        elif len(span.cell.parts) == 2 and "&" in span.text:
            forward, backward = span.cell.parts
            middle = span.start + span.text.index("&")
            text.stylize(style_of(forward, picture, palette), span.start, middle)
            text.stylize(style_of(backward, picture, palette), middle, end)
        elif span.cell.parts:
            text.stylize(style_of(span.cell.parts[0], picture, palette), span.start, end)
        else:
            text.stylize("reverse", span.start, end)
    return text


def style_of(part: Part, picture: Picture, palette: Palette | None) -> Style:
    """Ink and paper of one computation."""
    if palette is None:
        paper = f"bright_{BASIC_HUES[part.kind]}" if part.shade else BASIC_HUES[part.kind]
        return Style(color="black", bgcolor=paper, underline=bool((part.version or 0) % 2))  # no tints to be had
    color = palette.color_of(part, picture.num_shades)
    return Style(color=hexadecimal(ink_on(color)), bgcolor=hexadecimal(color))


def breaks(grid: Grid, length: int, room: int | None) -> list[tuple[int, int]]:
    """First and last column of each panel: as many whole ticks as there is room for, but at least one."""
    if room is None or length <= room:
        return [(0, length)]
    panel = max((room + 1) // grid.pitch, 1) * grid.pitch
    return [(start, start + panel) for start in range(0, length, panel)]
