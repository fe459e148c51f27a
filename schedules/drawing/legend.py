"""Legend: what the colours, borders and marks of a picture mean."""

from dataclasses import dataclass
from typing import Final, Literal
from xml.etree.ElementTree import Element, SubElement

from stagewright.schedules.drawing.cells import KINDS, Picture
from stagewright.schedules.drawing.palettes import NUM_TINTS, Color, Palette
from stagewright.schedules.drawing.shapes import FAINT, INK, WHITE, add_rect, add_step, add_text, text_width

_BOX, _HEIGHT, _LINE, _SIZE = 14.0, 12.0, 18.0, 11.0
_GAP: Final = 16.0


@dataclass(frozen=True)
class Entry:
    """A sample of boxes side by side, of a fused pair or of a step, and what it means."""

    words: str
    colors: tuple[Color, ...]
    sample: Literal["boxes", "fused", "step"] = "boxes"

    @property
    def width(self) -> float:
        """Of the sample and the words."""
        return _BOX * max(len(self.colors), 1) + 5 + text_width(self.words, _SIZE)


def entries_of(picture: Picture, palette: Palette) -> list[Entry]:
    """What a picture's legend has to explain: no more than what occurs in it."""
    num_shades = picture.num_shades
    shades = range(num_shades)
    which = ""
    if num_shades > 1:
        which = f", {'direction' if picture.is_bidirectional else 'chunk'} {' '.join(map(str, shades))}"
    entries = []
    for kind, words in KINDS.items():
        if any(kind == other for other, _ in picture.parts):
            colors = tuple(palette.color(kind, shade, num_shades) for shade in shades)
            entries.append(Entry(words + which, colors))
    if picture.fuses:
        entries.append(Entry("fused: both at once", (palette.color("F"), palette.color("B")), "fused"))
    entries += _versions(picture, palette)
    entries.append(Entry("idle", (WHITE,)))
    if any(picture.marks):
        entries.append(Entry("optimizer step", (), "step"))
    return entries


def _versions(picture: Picture, palette: Palette) -> list[Entry]:
    """The tint of each weight version, where there are several; they come round again after some."""
    versions = picture.versions
    if len(versions) < 2:
        return []
    entries = []
    for version in versions[:NUM_TINTS]:
        again = [str(other) for other in versions if other > version and (other - version) % NUM_TINTS == 0]
        words = f"weight version {version}{f', {again[0]}, …' if again else ''}"
        entries.append(Entry(words, tuple(palette.color(kind, version=version) for kind in "FB")))
    return entries


def add_legend(root: Element, picture: Picture, palette: Palette, left: float, top: float, right: float) -> float:
    """Draw the legend below ``top``, in as many lines as it takes; returns where it ends."""
    legend = SubElement(root, "g", {"class": "legend"})
    x, y = left, top
    for entry in entries_of(picture, palette):
        if x > left and x + entry.width > right:
            x, y = left, y + _LINE
        _add_sample(legend, entry, x, y)
        add_text(legend, x + _BOX * max(len(entry.colors), 1) + 5, y + 10, entry.words, _SIZE)
        x += entry.width + _GAP
    return y + _HEIGHT


def _add_sample(legend: Element, entry: Entry, x: float, y: float) -> None:
    for index, color in enumerate(entry.colors):
        line = None if entry.sample == "fused" else FAINT if color == WHITE else INK
        add_rect(legend, x + index * _BOX, y, _BOX, _HEIGHT, color, line)
    if entry.sample == "fused":
        add_rect(legend, x, y, _BOX * len(entry.colors), _HEIGHT, None, INK).set("stroke-width", "2")
    if entry.sample == "step":
        add_step(legend, x + _BOX / 2, y + 1, _HEIGHT - 1)
