"""DualPipeV: DualPipe on the V placement, which needs no second copy of the weights."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.formula import Formula
from stagewright.schedules.library.eight_steps import Lane, eight_steps, overlap_formula
from stagewright.schedules.placement import Placement, waves
from stagewright.schedules.registry import register
from stagewright.schedules.schedule import Order, Schedule


@register
@dataclass(frozen=True)
class DualPipeV(Schedule):
    """DualPipe cut in half: the two directions meet at the last rank and form a V (Qi et al. 2025).

    ::

        rank 0  F0 F1 F2 F3 F4 F5 F6 f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 F7&b3 -- .. .. .. f4&B0 -- b4 -- .. f5&B1 -- b5 -- .. f6&B2 -- b6 -- .. f7&B3 -- b7 -- I4 W4 I5 W5 I6 W6 I7 W7
        rank 1  .. F0 F1 F2 F3 F4 f0 F5 f1 i0 w0 f2 i1 w1 f3 F6&b2 -- .. .. f4&B0 -- F7&b3 -- f5&B1 -- b4 -- .. f6&B2 -- b5 -- .. f7&B3 -- b6 -- B4 -- .. i7 I5 w7 I6 W5 I7 W6 W7
        rank 2  .. .. F0 F1 F2 f0 F3 f1 F4 f2 i0 w0 f3 F5&b1 -- .. f4&B0 -- F6&b2 -- f5&B1 -- F7&b3 -- f6&B2 -- b4 -- .. f7&B3 -- b5 -- B4 -- .. b6 -- I5 .. i7 I6 W5 I7 w7 W6 W7
        rank 3  .. .. .. F0 f0 F1 f1 F2 f2 F3 f3 F4 b0 -- f4&B0 -- F5&b1 -- f5&B1 -- F6&b2 -- f6&B2 -- F7&b3 -- f7&B3 -- b4 -- B4 -- .. b5 -- B5 -- .. i6 I6 .. i7 I7 w6 W6 w7 W7
    """  # noqa: E501

    name: ClassVar[str] = "dualpipev"
    aliases: ClassVar[tuple[str, ...]] = ("dualpipe-v",)
    summary: ClassVar[str] = "forward of one chunk beside backward of the other, on a V; one copy of the weights"

    def check(self) -> None:
        """Refuse fewer microbatches than fill the V."""
        if self.num_microbatches < 2 * self.num_ranks:
            raise ScheduleError(
                "dualpipev needs at least twice as many microbatches as ranks: "
                f"got {self.num_microbatches} on {self.num_ranks} ranks; use {2 * self.num_ranks} or more"
            )

    @property
    def placement(self) -> Placement:
        """Stages r and 2P-1-r on rank r."""
        return waves(self.num_ranks)

    def order(self, rank: int) -> Order:
        """The eight steps; near is the way down the V, far the way up."""
        return eight_steps(
            near=Lane(rank),
            far=Lane(2 * self.num_ranks - 1 - rank),
            num_before=rank,
            num_after=self.num_ranks - 1 - rank,
            num_steady=self.num_microbatches - 2 * self.num_ranks + 1 + rank,
        )

    def bubble_formula(self, costs: Costs) -> Formula:
        """(P-1)(F&B+B-3W) in the durations of one chunk, exact for I = F, W <= F and B <= F&B <= F+B."""
        num_computations = 2 * self.num_microbatches
        num_pairs = num_computations - 2 * self.num_ranks - 1
        num_gaps = self.num_ranks - 1
        return overlap_formula("(P-1)(F&B+B-3W)", num_gaps, num_pairs, num_computations, costs, self.num_stages)
