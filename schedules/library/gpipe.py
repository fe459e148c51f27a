"""GPipe: all forwards, then all backwards."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.instructions import Backward, Forward
from stagewright.schedules.library.uniform import flush_formula
from stagewright.schedules.registry import register
from stagewright.schedules.schedule import Order, Schedule


@register
@dataclass(frozen=True)
class GPipe(Schedule):
    """All forwards, then all backwards (Huang et al. 2019, section 2.3).

    ::

        rank 0  F0 F1 F2 F3 .. .. .. .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 --
        rank 1  .. F0 F1 F2 F3 .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 -- .. ..
        rank 2  .. .. F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 -- .. .. .. ..
        rank 3  .. .. .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .. .. .. .. .. ..

    Args:
        last_first: take the backwards in reverse order of the forwards (LIFO) rather than in the same (FIFO).
    """

    last_first: bool = False

    name: ClassVar[str] = "gpipe"
    aliases: ClassVar[tuple[str, ...]] = ("fill-drain", "afab")
    summary: ClassVar[str] = "all forwards, then all backwards; stashes the whole batch"

    def order(self, rank: int) -> Order:
        """M forwards, M backwards."""
        microbatches = range(self.num_microbatches)
        forwards = [Forward(rank, microbatch) for microbatch in microbatches]
        backwards = [Backward(rank, microbatch) for microbatch in microbatches]
        return [*forwards, *(reversed(backwards) if self.last_first else backwards)]

    def bubble_formula(self, costs: Costs) -> Formula:
        """(P-1)(F+B), for any number of microbatches."""
        return flush_formula(self, costs)
