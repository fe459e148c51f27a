"""The palettes: who must be darker than whom, and what must stay apart for every reader."""

from itertools import combinations, pairwise

import pytest

from stagewright.schedules import ScheduleError
from stagewright.schedules.drawing.palettes import (
    NUM_TINTS,
    PALETTES,
    Color,
    Palette,
    hexadecimal,
    ink_on,
    luminance,
    palette_of,
)

EVERY_PALETTE = pytest.mark.parametrize("palette", PALETTES.values(), ids=PALETTES)

# How reds, greens and blues (linear) are seen: Machado, Oliveira and Fernandes 2009, severity 1.
VISION = {
    "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def lab(color: Color, vision: str) -> tuple[float, float, float]:
    """A colour in CIELAB as someone with that vision sees it."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (c / 255 for c in color)]
    red, green, blue = (
        min(max(sum(weight * part for weight, part in zip(row, linear)), 0.0), 1.0) for row in VISION[vision]
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    fx, fy, fz = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def distance(one: Color, other: Color, vision: str = "normal") -> float:
    """CIE76: below about 2 nobody sees a difference, from 10 on everybody does at a glance."""
    return sum((a - b) ** 2 for a, b in zip(lab(one, vision), lab(other, vision))) ** 0.5


@EVERY_PALETTE
def test_a_backward_is_darker_than_a_forward_of_its_chunk_and_version(palette: Palette) -> None:
    for num_shades in range(1, 9):
        for shade in range(num_shades):
            for version in (None, *range(2 * NUM_TINTS)):
                forward = palette.color("F", shade, num_shades, version)
                backward = palette.color("B", shade, num_shades, version)
                assert luminance(backward) + 0.05 < luminance(forward)


@EVERY_PALETTE
@pytest.mark.parametrize("kind", "FBIW")
def test_each_chunk_is_lighter_than_the_one_before(palette: Palette, kind: str) -> None:
    for num_shades in (2, 3, 4):
        shades = [palette.color(kind, shade, num_shades) for shade in range(num_shades)]
        assert all(luminance(later) > luminance(earlier) for earlier, later in pairwise(shades))
        assert all(distance(earlier, later) > 20 / (num_shades - 1) for earlier, later in pairwise(shades))
        assert luminance(shades[-1]) < 0.8  # never mistaken for idle time


@EVERY_PALETTE
@pytest.mark.parametrize("kind", "FB")
def test_weight_versions_differ_in_hue_and_not_in_lightness(palette: Palette, kind: str) -> None:
    tints = [palette.color(kind, version=version) for version in range(NUM_TINTS)]
    assert tints[0] == palette.color(kind)
    assert all(distance(one, other) > 10 for one, other in combinations(tints, 2))
    assert all(abs(luminance(tint) - luminance(tints[0])) < 0.02 for tint in tints)
    assert palette.color(kind, version=NUM_TINTS + 1) == tints[1]


@EVERY_PALETTE
def test_kinds_are_told_apart(palette: Palette) -> None:
    for shade in (0, 1):
        colors = [palette.color(kind, shade, 2) for kind in "FBIW"]
        assert all(distance(one, other) > 10 for one, other in combinations(colors, 2))


@pytest.mark.parametrize("vision", VISION)
def test_the_colorblind_palette_is_told_apart_by_everybody(vision: str) -> None:
    palette = PALETTES["colorblind"]
    colors = [palette.color(kind, shade, 2) for kind in "FBIW" for shade in (0, 1)]
    assert min(distance(one, other, vision) for one, other in combinations(colors, 2)) > 10


@EVERY_PALETTE
def test_numbers_are_legible_on_every_colour(palette: Palette) -> None:
    for kind in "FBIW":
        for shade in range(4):
            color = palette.color(kind, shade, 4)
            light, dark = sorted((luminance(color), luminance(ink_on(color))), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG AA


def test_an_unknown_palette_is_refused_with_those_there_are() -> None:
    with pytest.raises(ScheduleError, match="no palette 'pink'; there are megatron, deepseek, torch, colorblind"):
        palette_of("pink")


def test_hexadecimal() -> None:
    assert hexadecimal((255, 0, 10)) == "#ff000a"
