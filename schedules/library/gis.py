"""Grouped interleaved 1F1B with split backward: small groups, so that a rank holds fewer stashes."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.library.looped import Grouped
from stagewright.schedules.library.phases import gradients_then_forward
from stagewright.schedules.library.uniform import uniform
from stagewright.schedules.registry import register
from stagewright.schedules.schedule import Order


@register
@dataclass(frozen=True)
class GroupedInterleaved(Grouped):
    """Interleaved 1F1B that sends each input gradient on before it makes the weight gradient.

    Half of interleaved's warmup is then enough, and groups may be as small as half the ranks (Qi et al. 2024,
    "Pipeline parallelism with controllable memory").

    ::

        rank 0  F0 F1 F2 F3 f0 f1 f2 f3 .. .. .. i0 w0 .. i1 w1 .. i2 w2 .. i3 w3 I0 W0 I1 W1 I2 W2 I3 W3
        rank 1  .. F0 F1 F2 F3 f0 f1 f2 .. .. i0 w0 f3 i1 w1 .. i2 w2 .. i3 w3 I0 W0 I1 W1 I2 W2 I3 W3 ..
        rank 2  .. .. F0 F1 F2 F3 f0 f1 .. i0 w0 f2 i1 w1 f3 i2 w2 .. i3 w3 I0 W0 I1 W1 I2 W2 I3 W3 .. ..
        rank 3  .. .. .. F0 F1 F2 F3 f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 i3 w3 I0 W0 I1 W1 I2 W2 I3 W3 .. .. ..
    """

    name: ClassVar[str] = "gis"
    aliases: ClassVar[tuple[str, ...]] = ("grouped-interleaved",)
    summary: ClassVar[str] = "interleaved with small groups, input gradients first; fewer stashes than interleaved"

    smallest: ClassVar[str] = "P/2"

    @property
    def smallest_group(self) -> int:
        """Half the ranks, rounded up: with fewer the ranks wait for each other in a circle."""
        return (self.num_ranks + 1) // 2

    def order(self, rank: int) -> Order:
        """Interleaved's cells; each input gradient with its weight gradient right behind it."""
        forwards, backwards = self.forward_cells(rank, self.group), self.backward_cells(rank, self.group)
        num_warmup = min(self.num_ranks - rank + (self.num_chunks - 1) * self.group, len(forwards))
        return gradients_then_forward(forwards, backwards, num_warmup, num_deferred=0)

    def bubble_formula(self, costs: Costs) -> Formula | None:
        """(P-1)(F+I)/V for groups of P and more; with smaller ones the gaps between them, known for F = I = W."""
        stage = uniform(costs, self.num_stages)
        last_group = self.num_microbatches % self.group or self.group
        if not stage.equal and min(self.group, last_group) < self.num_ranks:
            return None
        if self.num_microbatches < self.smallest_group:
            return None
        idle = (self.num_ranks - 1) * (stage.forward + stage.input_gradient)
        work = stage.forward + stage.input_gradient + stage.weight_gradient
        text = "(P-1)(F+I)/V"
        if (missing := self.num_ranks - self.group) > 0:
            idle += missing * (self.num_chunks - 1) * stage.forward
            text += " + (P-N)(V-1)F/V"
        return Formula(text, idle, self.num_microbatches * self.num_chunks * work)
