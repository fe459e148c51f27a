"""ZB-V: no rank ever waits, in the memory of 1F1B."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.library.building_block import BuildingBlock
from stagewright.schedules.library.v_placed import VPlaced
from stagewright.schedules.registry import register


@register
@dataclass(frozen=True)
class ZeroBubbleV(VPlaced):
    """Two stages a rank in a V, so that no rank waits within P stashed microbatches (Qi et al. 2024, section 6).

    ::

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
