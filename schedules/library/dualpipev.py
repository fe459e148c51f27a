"""DualPipeV: DualPipe on the V placement, which needs no second copy of the weights."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.formula import Formula
from stagewright.schedules.library.eight_steps import Lane, eight_steps
from stagewright.schedules.placement import Placement, waves
from stagewright.schedules.registry import register
from stagewright.schedules.schedule import Order, Schedule


@register
@dataclass(frozen=True)
class DualPipeV(Schedule):
    """x"""

    name: ClassVar[str] = "dualpipev"
    summary: ClassVar[str] = "forward of one chunk beside backward of the other, down and up a V"

    @property
    def placement(self) -> Placement:
        """Stage r and stage 2P-1-r on rank r."""
        return waves(self.num_ranks)

    def order(self, rank: int) -> Order:
        """The eight steps."""
        return eight_steps(
            near=Lane(rank),
            far=Lane(2 * self.num_ranks - 1 - rank),
            num_before=rank,
            num_after=self.num_ranks - 1 - rank,
            num_steady=self.num_microbatches - 2 * self.num_ranks + 1 + rank,
        )
