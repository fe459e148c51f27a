"""Interleaved 1F1B: several stages a rank, so that the pipeline fills in smaller steps (Megatron-LM)."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.library.looped import Grouped, looped_formula
from stagewright.schedules.library.phases import one_forward_one_backward
from stagewright.schedules.registry import register
from stagewright.schedules.schedule import Order


@register
@dataclass(frozen=True)
class Interleaved(Grouped):
    """1F1B over several stages a rank, in groups of N microbatches (Narayanan et al. 2021, section 2.2).

    ::

        rank 0  F0 F1 F2 F3 f0 f1 f2 f3 .. .. .. .. .. .. b0 -- .. b1 -- .. b2 -- .. b3 -- B0 -- B1 -- B2 -- B3 --
        rank 1  .. F0 F1 F2 F3 f0 f1 f2 f3 .. .. .. b0 -- .. b1 -- .. b2 -- .. b3 -- B0 -- B1 -- B2 -- B3 -- .. ..
        rank 2  .. .. F0 F1 F2 F3 f0 f1 f2 .. b0 -- f3 b1 -- .. b2 -- .. b3 -- B0 -- B1 -- B2 -- B3 -- .. .. .. ..
        rank 3  .. .. .. F0 F1 F2 F3 f0 b0 -- f1 b1 -- f2 b2 -- f3 b3 -- B0 -- B1 -- B2 -- B3 -- .. .. .. .. .. ..
    """

    name: ClassVar[str] = "interleaved"
    aliases: ClassVar[tuple[str, ...]] = ("interleaved-1f1b", "interleaved1f1b", "vpp")
    summary: ClassVar[str] = "1F1B over V stages a rank; a V-th of the bubble for more stashes and V times the sends"

    def order(self, rank: int) -> Order:
        """As many forwards in advance as it takes the first gradient to come round."""
        forwards, backwards = self.forward_cells(rank, self.group), self.backward_cells(rank, self.group)
        num_warmup = min(2 * (self.num_ranks - 1 - rank) + (self.num_chunks - 1) * self.group, len(forwards))
        return one_forward_one_backward(forwards, backwards, num_warmup)

    def bubble_formula(self, costs: Costs) -> Formula:
        """(P-1)(F+B)/V, and more where there are fewer microbatches than ranks."""
        return looped_formula(self, costs)
