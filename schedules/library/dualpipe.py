"""DualPipe: microbatches enter at both ends, and forwards of one direction run beside backwards of the other."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.formula import Formula
from stagewright.schedules.library.eight_steps import Lane, eight_steps
from stagewright.schedules.placement import Placement, bidirectional
from stagewright.schedules.registry import register
from stagewright.schedules.schedule import Order, Schedule


@register
@dataclass(frozen=True)
class DualPipe(Schedule):
    """Two directions at once, each with its own copy of the weights (DeepSeek-V3 2024, section 3.2.1).
    """

    name: ClassVar[str] = "dualpipe"
    summary: ClassVar[str] = "microbatches from both ends, forward beside backward; two copies of the weights"

    def check(self) -> None:
        """Refuse odd counts, and fewer microbatches than fill the pipeline from both ends."""
        if self.num_ranks % 2:
            raise ScheduleError(
                f"dualpipe needs an even number of ranks, since its two directions meet in the middle: got {self.num_ranks}; "
                f"use {self.num_ranks + 1}, or dualpipev"
            )
        fewest = max(2 * self.num_ranks, self.num_microbatches + self.num_microbatches % 2)
        if self.num_microbatches != fewest:
            raise ScheduleError(
                "dualpipe needs an even number of microbatches, at least twice the ranks: "
                f"got {self.num_microbatches} on {self.num_ranks} ranks; use {fewest} or more"
            )

    @property
    def placement(self) -> Placement:
        """Stage s on rank s for the first half of the microbatches, on rank P-1-s for the other."""
        down = tuple(range(self.num_ranks))
        return bidirectional((down, down[::-1]), self.num_microbatches)

    def order(self, rank: int) -> Order:
        """The eight steps, mirrored in the second half of the ranks."""
        mirrored = self.num_ranks - 1 - rank
        num_half, num_ranks_half = self.num_microbatches // 2, self.num_ranks // 2
        distance = min(rank, mirrored)
        near_first, far_first = (0, num_half) if rank < mirrored else (num_half, 0)
        return eight_steps(
            near=Lane(distance, near_first),
            far=Lane(self.num_ranks - 1 - distance, far_first),
            num_before=distance,
            num_after=num_ranks_half - 1 - distance,
            num_steady=num_half - self.num_ranks + 1 + distance,
        )
