"""1F1B: one forward, one backward, so that few microbatches are in flight (PipeDream-Flush, DAPPLE)."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.library.phases import one_forward_one_backward
from stagewright.schedules.library.uniform import flush_formula
from stagewright.schedules.registry import register
from stagewright.schedules.schedule import Order, Schedule


@register
@dataclass(frozen=True)
class OneFOneB(Schedule):
    """One forward, one backward (PipeDream-Flush: Narayanan et al. 2021; DAPPLE: Fan et al. 2021, section 3).

    ::

        rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 -- .. B1 -- .. B2 -- .. B3 --
        rank 1  .. F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 -- .. ..
        rank 2  .. .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. .. .. ..
        rank 3  .. .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. .. .. ..

    Args:
        deep_warmup: DAPPLE's policy B: twice the warmup, so that communication hides behind more stashes.
    """

    deep_warmup: bool = False

    name: ClassVar[str] = "1f1b"
    aliases: ClassVar[tuple[str, ...]] = ("pipedream-flush", "dapple")
    summary: ClassVar[str] = "one forward, one backward; stashes at most P microbatches"

    def order(self, rank: int) -> Order:
        """As many forwards in advance as there are ranks behind this one."""
        distance = self.num_ranks - 1 - rank
        num_warmup = min(2 * distance if self.deep_warmup else distance, self.num_microbatches)
        cells = [(rank, microbatch) for microbatch in range(self.num_microbatches)]
        return one_forward_one_backward(cells, cells, num_warmup)

    def bubble_formula(self, costs: Costs) -> Formula:
        """(P-1)(F+B), for any number of microbatches."""
        return flush_formula(self, costs)
