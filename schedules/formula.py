"""Formula: what theory promises of a schedule's bubble."""

from dataclasses import dataclass
from typing import Literal

# Which of the three spans a formula speaks of (see Timeline).
Measure = Literal["makespan", "span", "steady"]


@dataclass(frozen=True)
class Formula:
    """A closed form of the idle time of one step.

    Args:
        text: the idle time as one writes it, such as ``(P-1)(F+B)``.
        idle: its value under the given costs.
        ideal: the busy time of a rank.
        measure: the span it speaks of: ``makespan``, per-rank ``span``, or ``steady`` period.
    """

    text: str
    idle: float
    ideal: float
    measure: Measure = "makespan"

    @property
    def fraction(self) -> float:
        """idle / (ideal + idle), comparable with ``Timeline.bubble_fraction``."""
        return self.idle / (self.ideal + self.idle)

    @property
    def overhead(self) -> float:
        """idle / ideal, comparable with ``Timeline.bubble_overhead``."""
        return self.idle / self.ideal
