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
    """DualPipe with the two directions joined at one end to a V ("cut-in-half": Qi et al., "DualPipe could be better without the Dual", 2025).

    ::

        GRID
    """

    name: ClassVar[str] = "dualpipev"
    aliases: ClassVar[tuple[str, ...]] = ("dualpipe-v",)
    summary: ClassVar[str] = "dualpipe on a V: forward of one chunk beside backward of the other, one copy of the weights"

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
