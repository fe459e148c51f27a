"""V-Min: a third of 1F1B's memory."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.library.building_block import BuildingBlock
from stagewright.schedules.library.v_placed import VPlaced
from stagewright.schedules.registry import register


@register
@dataclass(frozen=True)
class VMin(VPlaced):
    """Two stages a rank in a V, in a third of 1F1B's memory (Qi et al., NeurIPS 2024).

    ::

        rank 0  F0 F1 F2 .. .. .. .. f0 i0 w0 .. .. f1 i1 w1 I0 F3 W0 .. f2 i2 I1 w2 W1 .. f3 i3 I2 w3 W2 .. .. .. I3 W3
        rank 1  .. F0 F1 F2 .. .. f0 .. .. i0 w0 f1 .. .. I0 i1 w1 W0 f2 F3 I1 i2 w2 W1 f3 .. I2 i3 w3 W2 .. .. I3 W3 ..
        rank 2  .. .. F0 F1 .. f0 .. f1 .. .. i0 w0 F2 I0 W0 .. i1 f2 w1 I1 F3 W1 i2 f3 w2 I2 W2 .. i3 w3 .. I3 W3 .. ..
        rank 3  .. .. .. F0 f0 F1 f1 .. .. .. .. i0 I0 w0 F2 W0 f2 i1 I1 w1 W1 F3 f3 i2 I2 w2 W2 .. .. i3 I3 w3 W3 .. ..

    Args:
        costs: what the stages cost; the order is made for them.
    """

    name: ClassVar[str] = "v-min"
    aliases: ClassVar[tuple[str, ...]] = ("vmin",)
    summary: ClassVar[str] = (
        "two stages a rank in a V, split backward; a third of 1f1b's memory at two thirds of its bubble"
    )
    blocks: ClassVar[tuple[BuildingBlock, ...]] = (
        BuildingBlock(forward=(0, 0), gradient=(0, 0)),
        BuildingBlock(forward=(1, 0), gradient=(0, 0)),
        BuildingBlock(forward=(1, 0), gradient=(0.5, 0.25), spare=2),
        BuildingBlock(forward=(0, 0), gradient=(0.5, 0.75), spare=2),
        BuildingBlock(forward=(0.75, 0.75), gradient=(0, 0.5), turn=2, spare=2),
        BuildingBlock(forward=(0, 0.5), gradient=(0, 0), spare=1),
        BuildingBlock(forward=(0.25, 0.5), gradient=(0, 0), spare=1),
        BuildingBlock(forward=(0.75, 1), gradient=(1, 0), spare=2),
        BuildingBlock(forward=(0.25, 0), gradient=(0, 0.5)),
    )

    @property
    def num_stashed(self) -> int:
        """(P+4)//3 microbatches."""
        return (self.num_ranks + 4) // 3
