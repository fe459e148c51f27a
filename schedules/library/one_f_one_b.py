"""1F1B: one forward, one backward, so that few microbatches are in flight (PipeDream-Flush, DAPPLE)."""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.library.phases import one_forward_one_backward
from stagewright.schedules.library.uniform import uniform
from stagewright.schedules.registry import register
from stagewright.schedules.replicated import Replicated
from stagewright.schedules.schedule import Order


@register
@dataclass(frozen=True)
class OneFOneB(Replicated):
    """One forward, one backward (PipeDream-Flush: Narayanan et al. 2021; DAPPLE: Fan et al. 2021, section 3).

    ::

        rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 -- .. B1 -- .. B2 -- .. B3 --
        rank 1  .. F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 -- .. ..
        rank 2  .. .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. .. .. ..
        rank 3  .. .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. .. .. ..

    With ``replicas=(2, 1)`` ranks 0 and 1 share stage 0: each of its two replicas takes every other microbatch
    (1F1B-RR, Narayanan et al. 2019, section 3.2), and each begins its backwards after as many forwards as the stage
    behind it has in flight, dealt out to the replicas. Here stage 0 takes twice as long as stage 1:

    ::

        stage 0  F0 -- F2 -- .. B0 -- -- -- .. .. B2 -- -- -- .. .. ..
        stage 0  F1 -- F3 -- .. .. .. .. B1 -- -- -- .. .. B3 -- -- --
        stage 1  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..

    With one replica of the last stage, and times in proportion to the replicas, the bubble is (P-1)(F+B), where F and B
    are those of the last stage.

    Args:
        deep_warmup: DAPPLE's policy B: twice the warmup, so that communication hides behind more stashes.
        replicas: ranks of each stage, such as (2, 1), which take its microbatches by turns; one each where left out.
    """

    deep_warmup: bool = False

    name: ClassVar[str] = "1f1b"
    aliases: ClassVar[tuple[str, ...]] = ("pipedream-flush", "dapple")
    summary: ClassVar[str] = "one forward, one backward; stashes at most P microbatches"

    def order(self, rank: int) -> Order:
        """As many forwards in advance as there are ranks behind this one, if each stage has one rank."""
        cells, num_warmup = self.forwards(rank), self.num_warmup(rank)
        return one_forward_one_backward(
            cells, cells, min(2 * num_warmup if self.deep_warmup else num_warmup, len(cells))
        )

    def bubble_formula(self, costs: Costs) -> Formula | None:
        """(P-1)(F+B) for any number of microbatches; S stages of as many replicas each are pipelines side by side."""
        counts = self.replication.counts
        if len(set(counts)) > 1:
            return None
        stage = uniform(costs, self.num_stages)
        work, text = stage.forward + stage.backward, "(S-1)(F+B)" if self.replicas else "(P-1)(F+B)"
        return Formula(text, (self.num_stages - 1) * work, ceil(self.num_microbatches / counts[0]) * work)
