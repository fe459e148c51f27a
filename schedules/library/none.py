"""No pipelining: one microbatch at a time, for comparison."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.instructions import Backward, Computation, Forward
from stagewright.schedules.library.uniform import uniform
from stagewright.schedules.registry import register
from stagewright.schedules.schedule import Order, Schedule


@register
@dataclass(frozen=True)
class NoPipelining(Schedule):
    """Each microbatch runs forward and backward before the next begins.

    On one rank this is plain training, on several what is called naive model parallelism.

    ::

        rank 0  F0 .. .. .. .. .. .. .. .. .. B0 -- F1 .. .. .. .. .. .. .. .. .. B1 --
        rank 1  .. F0 .. .. .. .. .. .. B0 -- .. .. .. F1 .. .. .. .. .. .. B1 -- .. ..
        rank 2  .. .. F0 .. .. .. B0 -- .. .. .. .. .. .. F1 .. .. .. B1 -- .. .. .. ..
        rank 3  .. .. .. F0 B0 -- .. .. .. .. .. .. .. .. .. F1 B1 -- .. .. .. .. .. ..
    """

    name: ClassVar[str] = "none"
    aliases: ClassVar[tuple[str, ...]] = ("no-pipelining", "naive", "sequential")
    summary: ClassVar[str] = "one microbatch at a time; a single rank computes at any moment"

    def order(self, rank: int) -> Order:
        """M times a forward and its backward."""
        order: list[Computation] = []
        for microbatch in range(self.num_microbatches):
            order += [Forward(rank, microbatch), Backward(rank, microbatch)]
        return order

    def bubble_formula(self, costs: Costs) -> Formula:
        """(P-1)M(F+B): every rank waits for all the others, for each microbatch."""
        stage = uniform(costs, self.num_stages)
        work = self.num_microbatches * (stage.forward + stage.backward)
        return Formula("(P-1)M(F+B)", (self.num_ranks - 1) * work, work)
