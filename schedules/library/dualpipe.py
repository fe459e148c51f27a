"""DualPipe: microbatches enter at both ends, and forwards of one direction run beside backwards of the other."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.formula import Formula
from stagewright.schedules.library.eight_steps import Lane, eight_steps, overlap_formula
from stagewright.schedules.placement import Placement, bidirectional
from stagewright.schedules.registry import register
from stagewright.schedules.schedule import Order, Schedule


@register
@dataclass(frozen=True)
class DualPipe(Schedule):
    """Two directions at once, each with its own copy of the weights (DeepSeek-V3 2024, section 3.2.1).

    The second half of the microbatches enters at the last rank; what ``b5`` does there is what ``B1`` does here.

    ::

        rank 0  F0 F1 F2 f4 i4 w4 f5 F3&b5 -- .. f6&B0 -- b6 -- .. f7&B1 -- b7 -- I2 W2 I3 W3
        rank 1  .. F0 f4 F1 f5 F2 b4 -- f6&B0 -- F3&b5 -- f7&B1 -- b6 -- B2 -- .. i7 I3 w7 W3
        rank 2  .. f4 F0 f5 F1 f6 B0 -- F2&b4 -- f7&B1 -- F3&b5 -- B2 -- b6 -- .. I3 i7 W3 w7
        rank 3  f4 f5 f6 F0 I0 W0 F1 f7&B1 -- .. F2&b4 -- B2 -- .. F3&b5 -- B3 -- i6 w6 i7 w7
    """

    name: ClassVar[str] = "dualpipe"
    summary: ClassVar[str] = "microbatches from both ends, forward beside backward; two copies of the weights"

    def check(self) -> None:
        """Refuse odd counts, and fewer microbatches than fill the pipeline from both ends."""
        ranks, microbatches = self.num_ranks, self.num_microbatches
        if ranks % 2:
            nearest = f"{ranks - 1} or {ranks + 1}" if ranks > 1 else "2"
            raise ScheduleError(
                f"dualpipe needs an even number of ranks, half of them for each direction to enter at: got {ranks}; "
                f"use {nearest}, or dualpipev"
            )
        if microbatches % 2 or microbatches < 2 * ranks:
            enough = microbatches > 2 * ranks
            nearest = f"{microbatches - 1} or {microbatches + 1}" if enough else f"{2 * ranks} or more"
            raise ScheduleError(
                "dualpipe needs an even number of microbatches, at least twice the ranks: "
                f"got {microbatches} on {ranks} ranks; use {nearest}"
            )

    @property
    def placement(self) -> Placement:
        """Stage s on rank s for the first half of the microbatches, on rank P-1-s for the other."""
        down = tuple(range(self.num_ranks))
        return bidirectional((down, down[::-1]), self.num_microbatches)

    def order(self, rank: int) -> Order:
        """The eight steps; in the second half of the ranks, near is the direction that enters there."""
        last = self.num_ranks - 1
        num_before = min(rank, last - rank)
        first_near, first_far = (0, self.num_microbatches // 2)[:: 1 if rank == num_before else -1]
        return eight_steps(
            near=Lane(num_before, first_near),
            far=Lane(last - num_before, first_far),
            num_before=num_before,
            num_after=self.num_ranks // 2 - 1 - num_before,
            num_steady=self.num_microbatches // 2 - last + num_before,
        )

    def bubble_formula(self, costs: Costs) -> Formula:
        """(P/2-1)(F&B+B-3W), exact for I = F, W <= F and B <= F&B <= F+B."""
        num_gaps = self.num_ranks // 2 - 1
        num_pairs = self.num_microbatches - self.num_ranks - 1
        return overlap_formula("(P/2-1)(F&B+B-3W)", num_gaps, num_pairs, self.num_microbatches, costs, self.num_stages)
