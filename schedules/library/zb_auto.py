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

        rank 0  F0 F1 F2 F3 F4 F5 .. I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .. ..
        rank 1  .. F0 F1 F2 F3 F4 I0 F5 I1 W0 I2 W1 I3 W2 I4 W3 I5 W4 W5 .. ..
        rank 2  .. .. F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 W0 I4 W1 I5 W2 W3 W4 W5 ..
        rank 3  .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 W0 W1 W2 W3 W4 W5

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

        rank 0  F0 F1 F2 F3 .. .. .. I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
        rank 1  .. F0 F1 F2 F3 .. I0 W0 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5 ..
        rank 2  .. .. F0 F1 F2 I0 F3 I1 W0 I2 W1 F4 I3 W2 F5 I4 W3 I5 W4 W5 ..
        rank 3  .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

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

    def bubble_formula(self, costs: Costs) -> Formula | None:
        """(P-1)(F+I-W), for M >= P, W <= F <= I and the costs that the order was made for.

        Within P stashes that last until W, no order idles less. Before its last input gradient, the last rank
        has to do all but P of its weight gradients; that gradient then travels to the first rank.
        """
        stage = uniform(costs, self.num_stages)
        forward, inputs, weights = stage.forward, stage.input_gradient, stage.weight_gradient
        if costs != self.costs or self.num_microbatches < self.num_ranks or not weights <= forward <= inputs:
            return None
        idle = (self.num_ranks - 1) * (forward + inputs - weights)
        return Formula("(P-1)(F+I-W)", idle, self.num_microbatches * (forward + inputs + weights))


@register
@dataclass(frozen=True)
class ZeroBubble2P(MemoryCapped):
    """List-scheduled in twice the memory of 1F1B: 2P whole stashes on every rank (Qi et al. 2024, section 5).

    ::

        rank 0  F0 F1 F2 F3 F4 F5 F6 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 .. .. ..
        rank 1  .. F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 I3 W1 I4 W2 I5 W3 I6 W4 W5 W6 .. ..
        rank 2  .. .. F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 I5 W1 I6 W2 W3 W4 W5 W6 ..
        rank 3  .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 W1 W2 W3 W4 W5 W6

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

    def bubble_formula(self, costs: Costs) -> Formula | None:
        """Nothing, for F = I = W and M >= 2P - 1: no rank waits between its first instruction and its last."""
        stage = uniform(costs, self.num_stages)
        if costs != self.costs or not stage.equal or self.num_microbatches < 2 * self.num_ranks - 1:
            return None
        return Formula("0", 0.0, self.num_microbatches * (stage.forward + stage.backward), "span")
