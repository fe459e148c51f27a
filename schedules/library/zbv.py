"""ZB-V: no rank ever waits, in the memory of 1F1B."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.library.building_block import BuildingBlock
from stagewright.schedules.library.uniform import uniform
from stagewright.schedules.library.v_placed import VPlaced
from stagewright.schedules.registry import register


@register
@dataclass(frozen=True)
class ZeroBubbleV(VPlaced):
    """Two stages a rank in a V, so that no rank waits within P stashed microbatches (Qi et al. 2024, section 6).

    ::

        rank 0  F0 F1 F2 F3 .. .. .. f0 i0 f1 i1 f2 i2 f3 i3 I0 w0 I1 w1 I2 w2 I3 w3 W0 W1 W2 W3
        rank 1  .. F0 F1 F2 F3 .. f0 .. f1 i0 f2 i1 f3 i2 I0 i3 I1 w0 I2 w1 I3 w2 W0 w3 W1 W2 W3
        rank 2  .. .. F0 F1 F2 f0 F3 f1 .. f2 i0 f3 i1 I0 i2 I1 i3 I2 w0 I3 w1 W0 w2 W1 w3 W2 W3
        rank 3  .. .. .. F0 f0 F1 f1 F2 f2 F3 f3 i0 I0 i1 I1 i2 I2 i3 I3 w0 W0 w1 W1 w2 W2 w3 W3

    Args:
        costs: what the stages cost; the order is made for them.
    """

    name: ClassVar[str] = "zbv"
    aliases: ClassVar[tuple[str, ...]] = ("zb-v", "zbvzerobubble", "zero-bubble-v")
    summary: ClassVar[str] = "two stages a rank in a V, split backward; no bubble within a rank in 1f1b's memory"
    blocks: ClassVar[tuple[BuildingBlock, ...]] = (
        BuildingBlock(forward=(0, 1.5), gradient=(0, 2)),
        BuildingBlock(forward=(0, 1), gradient=(0, 2)),
        BuildingBlock(forward=(2, 1.5), gradient=(0.75, 0)),
    )
    gradients_early: ClassVar[bool] = False

    @property
    def num_stashed(self) -> int:
        """P microbatches."""
        return self.num_ranks

    def bubble_formula(self, costs: Costs) -> Formula | None:
        """Nothing, for F = I = W and M >= 2P: no rank waits between its first instruction and its last."""
        stage = uniform(costs, self.num_stages)
        if costs != self.costs or not stage.equal or self.num_microbatches < 2 * self.num_ranks:
            return None
        return Formula("0", 0.0, 2 * self.num_microbatches * (stage.forward + stage.backward), "span")
