"""Shapes: the few SVG elements that a picture is made of."""

from typing import Final
from xml.etree.ElementTree import Element, SubElement

from stagewright.schedules.drawing.palettes import Color, hexadecimal

INK: Final = (34, 34, 34)
FAINT: Final = (170, 170, 170)
WHITE: Final = (255, 255, 255)
# The width of a character of a sans-serif font, in font sizes: of a digit, and on average.
_DIGIT: Final = 0.6
_CHARACTER: Final = 0.54


def add_rect(
    parent: Element, x: float, y: float, width: float, height: float, fill: Color | None, line: Color | None = None
) -> Element:
    """A rectangle, with a thin line around it where one is given."""
    rect = SubElement(parent, "rect", x=number(x), y=number(y), width=number(width), height=number(height))
    rect.set("fill", "none" if fill is None else hexadecimal(fill))
    if line is not None:
        rect.attrib.update({"stroke": hexadecimal(line), "stroke-width": "0.6"})
    return rect


def add_text(parent: Element, x: float, y: float, words: str, size: float, *, color: Color = INK) -> Element:
    """A line of text that starts at x on the base line y."""
    text = SubElement(parent, "text", {"x": number(x), "y": number(y), "font-size": number(size)})
    text.set("fill", hexadecimal(color))
    text.text = words
    return text


def add_line(parent: Element, x: float, y: float, right: float, bottom: float, color: Color) -> Element:
    """A thin straight line."""
    line = SubElement(parent, "line", x1=number(x), y1=number(y), x2=number(right), y2=number(bottom))
    line.set("stroke", hexadecimal(color))
    return line


def add_step(parent: Element, x: float, y: float, height: float) -> None:
    """The mark of an optimizer step: a bar with a triangle on its top."""
    add_line(parent, x, y, x, y + height, INK).set("stroke-width", "1.6")
    corners = ((x - 3.5, y - 2.5), (x + 3.5, y - 2.5), (x, y + 4))
    points = " ".join(f"{number(right)},{number(down)}" for right, down in corners)
    SubElement(parent, "polygon", points=points, fill=hexadecimal(INK))


def text_width(words: str, size: float) -> float:
    """About how wide a line of text is."""
    return len(words) * _CHARACTER * size


def digits_width(count: int, size: float) -> float:
    """How wide a number of so many digits is."""
    return count * _DIGIT * size


def number(value: float) -> str:
    """A coordinate with no more digits than it needs."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
