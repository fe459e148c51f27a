"""Layout: where the cells of a picture are on the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10
from statistics import median_low
from typing import Final

from stagewright.schedules.drawing.cells import Picture
from stagewright.schedules.drawing.shapes import digits_width, text_width

MARGIN: Final = 12.0
ROW: Final = 22.0
NAME_SIZE: Final = 11.0
_GAP: Final = 4.0
_WIDEST: Final = 6000.0
_NUMBER_SIZES: Final = (11.0, 9.0, 7.5)


@dataclass(frozen=True)
class Layout:
    """Where things are, in pixels.

    Args:
        left, top: the corner of rank 0's row at time 0.
        scale: pixels of one unit of time.
        width: of the rows.
        number_size: font size of the microbatch numbers.
        number_width: of the widest of them; a cell that has not room for it shows none.
    """

    left: float
    top: float
    scale: float
    width: float
    number_size: float
    number_width: float

    @property
    def right(self) -> float:
        """The end of the rows."""
        return self.left + self.width

    def x(self, time: float) -> float:
        """The place of a moment."""
        return self.left + time * self.scale

    def y(self, rank: int) -> float:
        """The upper edge of a rank's row."""
        return self.top + rank * (ROW + _GAP)


def layout_of(picture: Picture, top: float, names: Sequence[str]) -> Layout:
    """Scale time so that a cell of middling length holds its number, unless the picture grew too wide."""
    cells = [cell for row in picture.rows for cell in row if cell.parts]
    typical = median_low([(cell.end - cell.start) / len(cell.parts) for cell in cells]) if cells else 1.0
    num_digits = max((len(str(part.microbatch)) for cell in cells for part in cell.parts), default=1)
    room_for_version = 8 if len(picture.versions) > 1 else 0
    end = picture.end or 1.0
    scale = min((12 + 6 * num_digits + room_for_version) / typical, _WIDEST / end)
    fitting = [size for size in _NUMBER_SIZES if digits_width(num_digits, size) + 1 <= typical * scale]
    number_size = (fitting or _NUMBER_SIZES)[0]
    left = MARGIN + max(text_width(name, NAME_SIZE) for name in names) + 8
    return Layout(left, top, scale, end * scale, number_size, digits_width(num_digits, number_size))


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, … (or .1, .2, .5, …) that is no smaller than this."""
    power: float = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
