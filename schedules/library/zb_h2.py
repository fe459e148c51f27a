"""ZB-H2: no bubble at all between a rank's first and last instruction, at twice 1F1B's memory."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.library.phases import gradients_then_forward
from stagewright.schedules.library.uniform import uniform
from stagewright.schedules.registry import register
from stagewright.schedules.schedule import Order, Schedule


@register
@dataclass(frozen=True)
class ZeroBubbleH2(Schedule):
    """Forwards fill the wait for the first gradient, weight gradients that for the last (Qi et al. 2024, section 2.3).

    A rank has no bubble of its own; it starts and ends later than the one before it, so that there is one
    all the same where the optimizer waits for all ranks.

    ::

        rank 0  F0 F1 F2 F3 F4 F5 F6 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 .. .. ..
        rank 1  .. F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 I3 W1 I4 W2 I5 W3 I6 W4 W5 W6 .. ..
        rank 2  .. .. F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 I5 W1 I6 W2 W3 W4 W5 W6 ..
        rank 3  .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 W1 W2 W3 W4 W5 W6
    """

    name: ClassVar[str] = "zb-h2"
    aliases: ClassVar[tuple[str, ...]] = ("zbh2", "zero-bubble-h2")
    summary: ClassVar[str] = "split backward and a deep warmup; no bubble within a rank at twice 1f1b's memory"

    def order(self, rank: int) -> Order:
        """Twice ZB-H1's forwards in advance, and twice its weight gradients held back."""
        num_warmup = min(2 * (self.num_ranks - 1 - rank) + 1, self.num_microbatches)
        cells = [(rank, microbatch) for microbatch in range(self.num_microbatches)]
        return gradients_then_forward(cells, cells, num_warmup, num_deferred=2 * rank)

    def bubble_formula(self, costs: Costs) -> Formula | None:
        """(P-1)(F+I-2W) of a rank's own span, for M >= 2P-1, W <= F and 2W <= F+I."""
        stage = uniform(costs, self.num_stages)
        forward, inputs, weights = stage.forward, stage.input_gradient, stage.weight_gradient
        too_few = self.num_microbatches < 2 * self.num_ranks - 1
        if too_few or weights > forward or 2 * weights > forward + inputs:
            return None
        idle = (self.num_ranks - 1) * (forward + inputs - 2 * weights)
        return Formula("(P-1)(F+I-2W)", idle, self.num_microbatches * (forward + inputs + weights), "span")
