"""Looped breadth-first: all microbatches through one chunk, then through the next."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.instructions import Backward, Forward
from stagewright.schedules.library.looped import Looped, looped_formula
from stagewright.schedules.registry import register
from stagewright.schedules.schedule import Order


@register
@dataclass(frozen=True)
class BreadthFirst(Looped):
    """Every chunk takes all forwards, then in reverse all backwards (Lamy-Poirier 2023, section 4).

    Each stage's weights are needed once a direction, which is what sharded data parallelism wants.

    ::

        rank 0  F0 F1 F2 F3 f0 f1 f2 f3 .. .. .. .. .. .. .. .. .. b3 -- b2 -- b1 -- b0 -- B3 -- B2 -- B1 -- B0 --
        rank 1  .. F0 F1 F2 F3 f0 f1 f2 f3 .. .. .. .. .. .. b3 -- b2 -- b1 -- b0 -- B3 -- B2 -- B1 -- B0 -- .. ..
        rank 2  .. .. F0 F1 F2 F3 f0 f1 f2 f3 .. .. .. b3 -- b2 -- b1 -- b0 -- B3 -- B2 -- B1 -- B0 -- .. .. .. ..
        rank 3  .. .. .. F0 F1 F2 F3 f0 f1 f2 f3 b3 -- b2 -- b1 -- b0 -- B3 -- B2 -- B1 -- B0 -- .. .. .. .. .. ..
    """

    name: ClassVar[str] = "bfs"
    aliases: ClassVar[tuple[str, ...]] = ("looped-bfs", "loopedbfs", "breadth-first")
    summary: ClassVar[str] = (
        "all microbatches chunk by chunk; interleaved's bubble, gpipe's stashes, weights needed once"
    )

    def order(self, rank: int) -> Order:
        """All forwards, chunk by chunk; then all backwards, exactly the other way round."""
        cells = self.forward_cells(rank, self.num_microbatches)
        return [Forward(*cell) for cell in cells] + [Backward(*cell) for cell in reversed(cells)]

    def bubble_formula(self, costs: Costs) -> Formula:
        """(P-1)(F+B)/V, and more where there are fewer microbatches than ranks."""
        return looped_formula(self, costs)
