"""ZB-H1: 1F1B with the weight gradients put into its bubble, at 1F1B's memory."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.library.phases import forward_then_gradients
from stagewright.schedules.library.uniform import uniform
from stagewright.schedules.registry import register
from stagewright.schedules.schedule import Order, Schedule


@register
@dataclass(frozen=True)
class ZeroBubbleH1(Schedule):
    """1F1B whose backward is split; rank r holds back r weight gradients (Qi et al. 2024, section 2.2).

    ::

        rank 0  F0 F1 F2 F3 .. .. .. I0 W0 I1 W1 I2 W2 I3 W3
        rank 1  .. F0 F1 F2 .. .. I0 F3 I1 W0 I2 W1 I3 W2 W3
        rank 2  .. .. F0 F1 .. I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
        rank 3  .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3
    """

    name: ClassVar[str] = "zb-h1"
    aliases: ClassVar[tuple[str, ...]] = ("zbh1", "zero-bubble-h1")
    summary: ClassVar[str] = "1f1b with split backward; a third of its bubble at its memory"

    def order(self, rank: int) -> Order:
        """The later the rank, the fewer forwards in advance and the more weight gradients held back."""
        num_warmup = min(self.num_ranks - 1 - rank, self.num_microbatches)
        cells = [(rank, microbatch) for microbatch in range(self.num_microbatches)]
        return forward_then_gradients(cells, cells, num_warmup, num_deferred=rank)

    def bubble_formula(self, costs: Costs) -> Formula | None:
        """(P-1)(F+I-W), for M >= P, W <= F and W <= I."""
        stage = uniform(costs, self.num_stages)
        forward, inputs, weights = stage.forward, stage.input_gradient, stage.weight_gradient
        if self.num_microbatches < self.num_ranks or weights > min(forward, inputs):
            return None
        idle = (self.num_ranks - 1) * (forward + inputs - weights)
        return Formula("(P-1)(F+I-W)", idle, self.num_microbatches * (forward + inputs + weights))
