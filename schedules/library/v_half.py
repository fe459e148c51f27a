"""V-Half: half of 1F1B's memory."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.library.building_block import BuildingBlock
from stagewright.schedules.library.v_placed import VPlaced
from stagewright.schedules.registry import register


@register
@dataclass(frozen=True)
class VHalf(VPlaced):
    """Two stages a rank in a V, in half of 1F1B's memory and at less than half its bubble (Qi et al., NeurIPS 2024).

    ::

        rank 0  F0 F1 F2 F3 .. .. .. f0 i0 f1 i1 w0 w1 .. f2 i2 I0 w2 W0 f3 i3 I1 w3 I2 W1 W2 .. I3 W3
        rank 1  .. F0 F1 F2 F3 .. f0 .. f1 i0 w0 i1 w1 f2 I0 W0 i2 w2 f3 .. I1 i3 I2 W1 w3 W2 I3 W3 ..
        rank 2  .. .. F0 F1 F2 f0 F3 f1 .. .. i0 w0 f2 I0 i1 w1 W0 f3 i2 I1 w2 I2 i3 W1 w3 I3 W2 W3 ..
        rank 3  .. .. .. F0 f0 F1 f1 F2 f2 .. .. i0 I0 w0 F3 W0 f3 i1 I1 i2 I2 w1 W1 i3 I3 w2 W2 w3 W3

    Args:
        costs: what the stages cost; the order is made for them.
    """

    name: ClassVar[str] = "v-half"
    aliases: ClassVar[tuple[str, ...]] = ("vhalf",)
    summary: ClassVar[str] = "two stages a rank in a V, split backward; half of 1f1b's memory and of its bubble"
    blocks: ClassVar[tuple[BuildingBlock, ...]] = (
        BuildingBlock(forward=(1, 0), gradient=(0, 1), turn=1),
        BuildingBlock(forward=(0.75, 0), gradient=(0, 0), turn=4),
        BuildingBlock(forward=(1, 0), gradient=(0, 0), turn=2),
        BuildingBlock(forward=(1, 0), gradient=(0, 0.5)),
        BuildingBlock(forward=(0.75, 0.75), gradient=(0.75, 0), turn=3),
        BuildingBlock(forward=(0.75, 0.25), gradient=(0, 0.5)),
        BuildingBlock(forward=(0.75, 0.5), gradient=(0.75, 0.25), turn=3),
        BuildingBlock(forward=(0.75, 1), gradient=(0, 0)),
        BuildingBlock(forward=(0.5, 0), gradient=(1.5, 0.75)),
    )

    @property
    def num_stashed(self) -> int:
        """(P+2)//2 microbatches."""
        return (self.num_ranks + 2) // 2
