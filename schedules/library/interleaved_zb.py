"""Interleaved zero bubble: interleaved 1F1B with the weight gradients put into its gaps."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.library.looped import Grouped
from stagewright.schedules.library.phases import forward_then_gradients
from stagewright.schedules.library.uniform import uniform
from stagewright.schedules.registry import register
from stagewright.schedules.schedule import Order


@register
@dataclass(frozen=True)
class InterleavedZeroBubble(Grouped):
    """ZB-H1 over several stages a rank, in groups of N microbatches.

    Since only the input gradient is on the way back, half of interleaved's warmup is enough; each rank then
    holds back as many weight gradients as there are ranks before it, within interleaved's peak.

    ::

        rank 0  F0 F1 F2 F3 f0 f1 f2 f3 .. .. .. i0 w0 i1 w1 i2 w2 i3 w3 I0 W0 I1 W1 I2 W2 I3 W3
        rank 1  .. F0 F1 F2 F3 f0 f1 f2 .. .. i0 f3 i1 w0 i2 w1 i3 w2 I0 w3 I1 W0 I2 W1 I3 W2 W3
        rank 2  .. .. F0 F1 F2 F3 f0 f1 .. i0 f2 i1 f3 i2 w0 i3 w1 I0 w2 I1 w3 I2 W0 I3 W1 W2 W3
        rank 3  .. .. .. F0 F1 F2 F3 f0 i0 f1 i1 f2 i2 f3 i3 w0 I0 w1 I1 w2 I2 w3 I3 W0 W1 W2 W3
    """

    name: ClassVar[str] = "interleaved-zb"
    aliases: ClassVar[tuple[str, ...]] = ("interleaved-zero-bubble", "interleavedzerobubble")
    summary: ClassVar[str] = "interleaved with split backward; a third of its bubble within its memory"

    def order(self, rank: int) -> Order:
        """Interleaved's cells in ZB-H1's pattern."""
        forwards, backwards = self.forward_cells(rank, self.group), self.backward_cells(rank, self.group)
        group = min(self.group, self.num_microbatches)
        num_warmup = min(self.num_ranks - 1 - rank + (self.num_chunks - 1) * group, len(forwards))
        return forward_then_gradients(forwards, backwards, num_warmup, num_deferred=rank)

    def bubble_formula(self, costs: Costs) -> Formula | None:
        """(P-1)(F+I-W)/V, for M >= P, W <= F and W <= I."""
        stage = uniform(costs, self.num_stages)
        forward, inputs, weights = stage.forward, stage.input_gradient, stage.weight_gradient
        if self.num_microbatches < self.num_ranks or weights > min(forward, inputs):
            return None
        idle = (self.num_ranks - 1) * (forward + inputs - weights)
        ideal = self.num_microbatches * self.num_chunks * (forward + inputs + weights)
        return Formula("(P-1)(F+I-W)/V", idle, ideal)
