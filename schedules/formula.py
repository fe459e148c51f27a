"""Formula: what theory promises of a schedule's bubble."""

from dataclasses import dataclass
from math import isclose
from typing import Literal, assert_never

from stagewright.schedules.timeline import Timeline

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
        """idle / (ideal + idle), comparable with ``Timeline.bubble_fraction``, ``span_bubble`` or ``steady_bubble``."""
        return self.idle / (self.ideal + self.idle) if self.ideal + self.idle else 0.0

    @property
    def overhead(self) -> float:
        """idle / ideal, comparable with ``Timeline.bubble_overhead``."""
        return self.idle / self.ideal if self.ideal else 0.0

    def agrees_with(self, timeline: Timeline) -> bool:
        """Whether a timeline's makespan, span or steady period, whichever is meant, is what the formula says."""
        match self.measure:
            case "makespan":
                found = timeline.makespan
            case "span":
                found = timeline.span
            case "steady":
                found = timeline.steady_period
            case _:
                assert_never(self.measure)
        return isclose(found, self.ideal + self.idle, rel_tol=1e-6)
