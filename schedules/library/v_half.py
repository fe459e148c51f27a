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

    Args:
        costs: what the stages cost; the order is made for them.
    """

    name: ClassVar[str] = "v-half"
    aliases: ClassVar[tuple[str, ...]] = ("vhalf",)
    summary: ClassVar[str] = "two stages a rank in a V, split backward; half of 1f1b's memory and of its bubble"
    blocks: ClassVar[tuple[BuildingBlock, ...]] = (
        BuildingBlock(forward=(0, 1), gradient=(0, 0), turn=1),
        BuildingBlock(forward=(0.75, 0), gradient=(0, 0), turn=2),
        BuildingBlock(forward=(1, 0), gradient=(0, 0.5)),
        BuildingBlock(forward=(0.75, 0.75), gradient=(0.75, 0), turn=3),
        BuildingBlock(forward=(0, 2), gradient=(1.5, 0.25), spare=1),
        BuildingBlock(forward=(0.5, 0), gradient=(1.5, 0.75)),
        BuildingBlock(forward=(0.75, 0.25), gradient=(0, 0.5)),
        BuildingBlock(forward=(0, 0), gradient=(0, 0)),
    )

    @property
    def num_stashed(self) -> int:
        """(P+2)//2 microbatches."""
        return (self.num_ranks + 2) // 2
