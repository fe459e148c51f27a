"""Palettes: the house styles in which the papers draw schedules.

The hue tells what is computed, the lightness which chunk (or direction) it belongs to, and a tint which weight
version it uses.
"""

import colorsys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from stagewright.schedules.drawing.cells import Part
from stagewright.schedules.errors import ScheduleError

Color = tuple[int, int, int]

_WHITE: Final = (255, 255, 255)
# How far the last chunk is on its way to white.
_LIGHTEST: Final = 0.55
# Each weight version turns the hues by so much of a circle, forwards and backwards away from each other.
_TURN: Final = 35 / 360
# Versions that a picture tells apart by tint; then the tints come round again.
NUM_TINTS: Final = 4


@dataclass(frozen=True)
class Palette:
    """The colour of every kind of computation."""

    name: str
    forward: Color
    backward: Color
    input_gradient: Color
    weight_gradient: Color

    def color(self, kind: str, shade: int = 0, num_shades: int = 1, version: int | None = None) -> Color:
        """The colour of a computation, by the letter of its kind, its shade, and its weight version if it names one."""
        color = {
            "F": self.forward,
            "B": self.backward,
            "I": self.input_gradient,
            "W": self.weight_gradient,
        }[kind]
        if shade:
            color = _mixed(color, _WHITE, _LIGHTEST * shade / (num_shades - 1))
        tint = (version or 0) % NUM_TINTS
        return _turned(color, self._direction(kind) * tint * _TURN) if tint else color

    def _direction(self, kind: str) -> int:
        """Which way a hue turns: forwards away from backwards, and all else with the backwards."""
        lead = (_hue(self.forward) - _hue(self.backward)) % 1.0
        return 1 if (lead < 0.5) == (kind == "F") else -1

    def color_of(self, part: Part, num_shades: int) -> Color:
        """The colour of a part of a cell."""
        return self.color(part.kind, part.shade, num_shades, part.version)


PALETTES: Final[Mapping[str, Palette]] = MappingProxyType(
    {
        palette.name: palette
        for palette in (
            # Megatron-LM and its interleaved schedule: blue forwards, green backwards.
            Palette("megatron", (98, 152, 226), (46, 118, 56), (0, 140, 150), (150, 104, 48)),
            # DualPipe: orange forwards, green backwards, their halves in teal and blue.
            Palette("deepseek", (244, 170, 66), (84, 150, 70), (60, 160, 160), (76, 110, 190)),
            # The visualizer of torch.distributed.pipelining: blue, orange, teal, green.
            Palette("torch", (116, 154, 246), (196, 92, 0), (0, 150, 160), (48, 120, 40)),
            # Okabe and Ito's colours, told apart with any kind of colour blindness; the vermilion is darkened.
            Palette("colorblind", (86, 180, 233), (190, 74, 0), (230, 159, 0), (0, 158, 115)),
        )
    }
)


def palette_of(name: str) -> Palette:
    """The palette of a name.

    Raises:
        ScheduleError: there is none of that name.
    """
    if name not in PALETTES:
        raise ScheduleError(f"there is no palette {name!r}; there are {', '.join(PALETTES)}")
    return PALETTES[name]


def hexadecimal(color: Color) -> str:
    """``#rrggbb``."""
    return "#{:02x}{:02x}{:02x}".format(*color)


def ink_on(color: Color) -> Color:
    """Black or white, whichever is the more legible on a colour (WCAG contrast)."""
    return (0, 0, 0) if luminance(color) > 0.1791 else _WHITE


def luminance(color: Color) -> float:
    """The relative luminance of a colour, from 0 (black) to 1 (white), as WCAG 2 defines it."""
    red, green, blue = (_linear(channel / 255) for channel in color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def _mixed(color: Color, other: Color, share: float) -> Color:
    red, green, blue = (round(one + (two - one) * share) for one, two in zip(color, other))
    return red, green, blue


def _hue(color: Color) -> float:
    return colorsys.rgb_to_hls(*(channel / 255 for channel in color))[0]


def _turned(color: Color, turn: float) -> Color:
    """A colour with its hue turned by a part of a full circle, as light as it was."""
    hue, _, saturation = colorsys.rgb_to_hls(*(channel / 255 for channel in color))
    darker, lighter = 0.0, 1.0
    for _ in range(8):
        middle = (darker + lighter) / 2
        red, green, blue = (round(part * 255) for part in colorsys.hls_to_rgb((hue + turn) % 1.0, middle, saturation))
        if luminance((red, green, blue)) < luminance(color):
            darker = middle
        else:
            lighter = middle
    return red, green, blue
