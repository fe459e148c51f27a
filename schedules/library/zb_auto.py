"""ZB-1p, ZB-2p and their general form: split backward, list-scheduled under a memory cap."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.formula import Formula
from stagewright.schedules.library.building_block import BuildingBlock
from stagewright.schedules.library.lanes import Pipeline, pipeline_of
from stagewright.schedules.library.portfolio import ListScheduled
from stagewright.schedules.library.uniform import uniform
from stagewright.schedules.registry import register


@dataclass(frozen=True)
class MemoryCapped(ListScheduled, ABC):
    """One stage a rank, list-scheduled within a cap on what a rank may stash."""

    blocks: ClassVar[tuple[BuildingBlock, ...]] = (
        BuildingBlock(forward=(2,), gradient=(2.25,), turn=1),
        BuildingBlock(forward=(2,), gradient=(2.25,)),
        BuildingBlock(forward=(2.5,), gradient=(2.5,)),
        BuildingBlock(forward=(1.5,), gradient=(1.5,), turn=1),
        BuildingBlock(forward=(1.25,), gradient=(1.25,)),
        BuildingBlock(forward=(1,), gradient=(1,)),
        BuildingBlock(forward=(0,), gradient=(0,)),
    )

    @property
    @abstractmethod
    def memory_caps(self) -> Sequence[float]:
        """The most that each rank may stash, in the unit of ``costs.activation_bytes`` and ``weight_bytes``."""

    @property
    def stashes(self) -> tuple[float, ...]:
        """What a microbatch stashes at most on each stage."""
        costs = self.costs.of_stages(self.num_stages)
        return tuple(map(sum, zip(costs.activation_bytes, costs.weight_bytes)))

    @property
    def pipeline(self) -> Pipeline:
        """A line of stages; F fills the stash, I frees one part of it, W the other."""
        costs = self.costs.of_stages(self.num_stages)
        stashes = (costs.activation_bytes, costs.weight_bytes)
        return pipeline_of(range(self.num_ranks), self.num_microbatches, self.costs, self.memory_caps, stashes)


@register
@dataclass(frozen=True)
class ZeroBubbleAuto(MemoryCapped):
    """Split backward, ordered for given costs within a given memory (Qi et al. 2024, section 3.1).

    ::

    Args:
        costs: what the stages cost, also in memory; the order is made for them.
        memory_cap: the most that a rank may stash, in the unit of ``costs.activation_bytes`` and ``weight_bytes``;
            left out, 2P whole stashes of the largest stage.
    """

    memory_cap: float | None = None

    name: ClassVar[str] = "zb-auto"
    aliases: ClassVar[tuple[str, ...]] = ("zero-bubble-auto", "zb-greedy")
    summary: ClassVar[str] = "split backward, list-scheduled for given costs within a given memory"

    def check(self) -> None:
        """Refuse a cap under which not even one microbatch at a time would fit."""
        super().check()
        if self.memory_cap is not None and self.memory_cap < max(self.stashes):
            stage = self.stashes.index(max(self.stashes))
            raise ScheduleError(
                f"memory_cap holds at least what one microbatch stashes: got {self.memory_cap:g} while it is "
                f"{self.stashes[stage]:g} on stage {stage}; use that or more"
            )

    @property
    def memory_caps(self) -> Sequence[float]:
        """The same on every rank."""
        cap = 2 * self.num_ranks * max(self.stashes) if self.memory_cap is None else self.memory_cap
        return (cap,) * self.num_ranks


@register
@dataclass(frozen=True)
class ZeroBubble1P(MemoryCapped):
    """List-scheduled in the memory of 1F1B: P whole stashes on every rank (Qi et al. 2024, section 5).

    ::

    Args:
        costs: what the stages cost, also in memory; the order is made for them.
    """

    name: ClassVar[str] = "zb-1p"
    aliases: ClassVar[tuple[str, ...]] = ("zb1p",)
    summary: ClassVar[str] = "split backward, list-scheduled for given costs in 1f1b's memory"

    @property
    def memory_caps(self) -> Sequence[float]:
        """P of a rank's own stashes."""
        return tuple(self.num_ranks * stash for stash in self.stashes)


@register
@dataclass(frozen=True)
class ZeroBubble2P(MemoryCapped):
    """List-scheduled in twice the memory of 1F1B: 2P whole stashes on every rank (Qi et al. 2024, section 5).

    ::

    Args:
        costs: what the stages cost, also in memory; the order is made for them.
    """

    name: ClassVar[str] = "zb-2p"
    aliases: ClassVar[tuple[str, ...]] = ("zb2p",)
    summary: ClassVar[str] = "split backward, list-scheduled for given costs; no rank waits in twice 1f1b's memory"

    @property
    def memory_caps(self) -> Sequence[float]:
        """2P of a rank's own stashes."""
        return tuple(2 * self.num_ranks * stash for stash in self.stashes)
