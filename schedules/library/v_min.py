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

    Args:
        costs: what the stages cost; the order is made for them.
    """

    name: ClassVar[str] = "v-min"
    aliases: ClassVar[tuple[str, ...]] = ("vmin",)
    summary: ClassVar[str] = "two stages a rank in a V, split backward; a third of 1f1b's memory, two thirds of its bubble"
    blocks: ClassVar[tuple[BuildingBlock, ...]] = (
        BuildingBlock(forward=(0, 0.5), gradient=(0, 0), spare=1),
        BuildingBlock(forward=(0.25, 0.75), gradient=(1, 0.25), spare=1),
        BuildingBlock(forward=(0, 0), gradient=(0.25, 0), spare=1),
        BuildingBlock(forward=(1, 1), gradient=(0, 0), spare=2),
        BuildingBlock(forward=(0.25, 0), gradient=(0, 0.75), spare=2),
        BuildingBlock(forward=(0.75, 0.5), gradient=(0, 0), turn=1, spare=2),
        BuildingBlock(forward=(1, 0), gradient=(0, 0.5)),
        BuildingBlock(forward=(1, 0), gradient=(0, 0.75), spare=2),
        BuildingBlock(forward=(0, 0.5), gradient=(0, 0), turn=3, spare=1),
        BuildingBlock(forward=(0, 0), gradient=(0, 0)),
    )

    @property
    def num_stashed(self) -> int:
        """(P+4)//3 microbatches."""
        return (self.num_ranks + 4) // 3
