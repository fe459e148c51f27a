"""Hanayo: stages laid out in waves, so that microbatches turn round at both ends of the ranks."""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import ClassVar, TypeAlias

from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.instructions import Backward, Computation, Forward
from stagewright.schedules.library.uniform import uniform
from stagewright.schedules.placement import Placement, waves
from stagewright.schedules.registry import register
from stagewright.schedules.schedule import Order, Schedule, check_count

# A computation as list scheduling sees it: the tick it is planned for, whether it is a backward, stage, microbatch.
Planned: TypeAlias = tuple[int, bool, int, int]


@register
@dataclass(frozen=True)
class Hanayo(Schedule):
    """Every microbatch runs down the ranks and up again, once a wave (Liu et al. 2023).

    ::

        rank 0  F0 F1 F2 F3 .. .. .. f0 b0 -- f1 b1 -- f2 b2 -- f3 b3 -- .. .. .. .. .. B0 -- .. .. B1 -- B2 -- .. .. B3 --
        rank 1  .. F0 F1 F2 .. .. f0 F3 f1 .. b0 -- f2 b1 -- f3 b2 -- .. b3 -- .. B0 -- .. .. B1 -- B2 -- .. .. B3 -- .. ..
        rank 2  .. .. F0 F1 .. f0 F2 f1 F3 f2 .. .. b0 -- f3 b1 -- .. b2 -- B0 -- b3 -- B1 -- B2 -- .. .. B3 -- .. .. .. ..
        rank 3  .. .. .. F0 f0 F1 f1 F2 f2 F3 f3 .. .. .. b0 -- B0 -- b1 -- B1 -- b2 -- B2 -- b3 -- B3 -- .. .. .. .. .. ..

    Args:
        num_waves: times that the stages run down and up, w; each rank holds 2w of them.
    """  # noqa: E501

    num_waves: int = 1

    name: ClassVar[str] = "hanayo"
    aliases: ClassVar[tuple[str, ...]] = ("wave",)
    summary: ClassVar[str] = "stages in waves over the ranks, list-scheduled; the more waves the smaller the bubble"

    def check(self) -> None:
        """Any number of waves from 1 up will do."""
        check_count("num_waves", self.num_waves)

    @property
    def placement(self) -> Placement:
        """Down the ranks and up again, ``num_waves`` times."""
        return waves(self.num_ranks, self.num_waves)

    @property
    def num_stages(self) -> int:
        """2w stages a rank."""
        return 2 * self.num_waves * self.num_ranks

    def order(self, rank: int) -> Order:
        """What list scheduling gives this rank."""
        return self._orders[rank]

    @cached_property
    def _orders(self) -> tuple[list[Computation], ...]:
        """All orders, by list scheduling from the end of the batch back to its start, with F = 1 and B = 2 ticks.

        Back in time a microbatch starts with the backward of stage 0 and ends with its forward. Whenever a
        rank is free, it takes what is planned first of what it could do.
        """
        rank_of = self.placement.routes[0]
        orders: list[list[Computation]] = [[] for _ in range(self.num_ranks)]
        ready: list[list[Planned]] = [[] for _ in range(self.num_ranks)]
        free = [0] * self.num_ranks  # from this tick on
        num_started = min(self.num_microbatches, 2 * self.num_ranks)  # more in flight would only cost memory
        arriving = defaultdict(list, {0: [self._planned(True, 0, started) for started in range(num_started)]})
        tick = 0
        while arriving or any(ready):
            for planned in arriving.pop(tick, ()):
                heappush(ready[rank_of[planned[2]]], planned)
            for rank, choices in enumerate(ready):
                if not choices or free[rank] > tick:
                    continue
                _, is_backward, stage, started = heappop(choices)
                kind, free[rank] = (Backward, tick + 2) if is_backward else (Forward, tick + 1)
                orders[rank].append(kind(stage, self.num_microbatches - 1 - started))
                follower = self._after(is_backward, stage, started)
                if follower is None and num_started < self.num_microbatches:
                    follower = self._planned(True, 0, num_started)
                    num_started += 1
                if follower is not None:
                    arriving[free[rank]].append(follower)
            tick += 1
        return tuple(order[::-1] for order in orders)

    def _after(self, is_backward: bool, stage: int, started: int) -> Planned | None:
        """What comes next of the same microbatch, back in time."""
        if is_backward and stage + 1 < self.num_stages:
            return self._planned(True, stage + 1, started)
        if is_backward:
            return self._planned(False, stage, started)
        return self._planned(False, stage - 1, started) if stage else None

    def _planned(self, is_backward: bool, stage: int, started: int) -> Planned:
        """When a computation would run if each microbatch went without a stop, two stages behind the one before.

        P microbatches then leave no gap: on every rank those on their way down and those on their way up come
        by turns. Further groups of P, or somewhat more, follow when a rank can be done with the one before.
        """
        num_groups = max(self.num_microbatches // self.num_ranks, 1)
        group = started * num_groups // self.num_microbatches
        first = -(-group * self.num_microbatches // num_groups)
        tick = 6 * self.num_waves * first
        if is_backward:
            tick += 2 * stage + 4 * (started - first)
        else:
            tick += 2 * self.num_stages + (self.num_stages - 1 - stage) + 2 * (started - first)
        return tick, is_backward, stage, started

    def bubble_formula(self, costs: Costs) -> Formula | None:
        """2(P-1)B in the durations of one chunk, for M = P and B >= F; no order of these stages idles less.

        For all that time the last rank has nothing to do: until the first backward has come up to it it can
        only do forwards, and after its own last backward those of the ranks before it remain.
        """
        stage = uniform(costs, self.num_stages)
        if self.num_microbatches != self.num_ranks or stage.backward < stage.forward:
            return None
        ideal = 2 * self.num_waves * self.num_microbatches * (stage.forward + stage.backward)
        return Formula("2(P-1)B", 2 * (self.num_ranks - 1) * stage.backward, ideal)
