"""Looped: what interleaved schedules have in common, several stages a rank and microbatches taken in groups."""

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.formula import Formula
from stagewright.schedules.library.uniform import uniform
from stagewright.schedules.placement import Placement, looped
from stagewright.schedules.schedule import Schedule, check_count


@dataclass(frozen=True)
class Looped(Schedule, ABC):
    """A schedule on the looped placement: rank r owns stages r, P + r, 2P + r, …

    Args:
        num_chunks: stages of each rank, V.
    """

    num_chunks: int = 2

    def check(self) -> None:
        """Any number of chunks from 1 up will do."""
        check_count("num_chunks", self.num_chunks)

    @property
    def placement(self) -> Placement:
        """Rank r owns stages r, P + r, 2P + r, …"""
        return looped(self.num_ranks, self.num_chunks)

    def forward_cells(self, rank: int, group_size: int) -> list[tuple[int, int]]:
        """The (stage, microbatch) of a rank's forwards: group by group, in each chunk by chunk."""
        return self._cells(range(rank, self.num_ranks * self.num_chunks, self.num_ranks), group_size)

    def backward_cells(self, rank: int, group_size: int) -> list[tuple[int, int]]:
        """The (stage, microbatch) of a rank's backwards: group by group, in each from the last chunk to the first."""
        return self._cells(range(rank, self.num_ranks * self.num_chunks, self.num_ranks)[::-1], group_size)

    def _cells(self, stages: range, group_size: int) -> list[tuple[int, int]]:
        return [
            (stage, microbatch)
            for first in range(0, self.num_microbatches, group_size)
            for stage in stages
            for microbatch in range(first, min(first + group_size, self.num_microbatches))
        ]


@dataclass(frozen=True)
class Grouped(Looped, ABC):
    """A looped schedule that takes a group of microbatches through one chunk, then through the next.

    A group holds at least ``smallest_group`` microbatches, the last one too, which may be smaller than the
    others. Fewer microbatches than that form a single group.

    Args:
        group_size: microbatches of a group, N; left out, the smallest legal one that keeps all ranks busy.
    """

    group_size: int | None = None

    smallest: ClassVar[str] = "P"

    def check(self) -> None:
        """Refuse groups that are too small for their first forward to come round in time."""
        super().check()
        if self.group_size is None:
            return
        check_count("group_size", self.group_size)
        if not self._serves(self.group_size, self.num_microbatches):
            raise ScheduleError(
                f"{self.name} takes groups of N >= {self.smallest} microbatches, the last one (M % N, unless 0) too: "
                f"got group_size={self.group_size} with {self.num_microbatches} microbatches on {self.num_ranks} "
                f"ranks; use {self._remedies(self.group_size)}"
            )

    @property
    def smallest_group(self) -> int:
        """The fewest microbatches that a group may hold."""
        return self.num_ranks

    @property
    def group(self) -> int:
        """The group size in use: the one given, or the smallest from P up that is legal, or M where M is less."""
        if self.group_size is not None:
            return self.group_size
        sizes = range(self.num_ranks, self.num_microbatches)
        return next((size for size in sizes if self._serves(size, self.num_microbatches)), self.num_microbatches)

    def _serves(self, group_size: int, num_microbatches: int) -> bool:
        if num_microbatches < self.smallest_group:
            return group_size == num_microbatches
        rest = num_microbatches % group_size
        return group_size >= self.smallest_group and (rest == 0 or rest >= self.smallest_group)

    def _remedies(self, group_size: int) -> str:
        """The legal group size nearest to one that is not, and the nearest batches for which that one would be."""
        given = self.num_microbatches
        legal = [size for size in range(1, given + 1) if self._serves(size, given)]
        remedy = f"group_size={min(legal, key=lambda size: abs(size - group_size))}"
        if group_size < self.smallest_group:
            return remedy
        fewer = [count for count in range(1, given) if self._serves(group_size, count)]
        more = next(count for count in range(given + 1, given + group_size + 1) if self._serves(group_size, count))
        return f"{remedy}, or {' or '.join(map(str, [*fewer[-1:], more]))} microbatches"


def looped_formula(schedule: Looped, costs: Costs) -> Formula:
    """The bubble of a pipeline that fills, and drains, once a batch, in steps of a chunk.

    F and B in the text are those of a whole rank. With fewer microbatches than ranks, each of the V - 1
    returns to the first rank leaves a gap.
    """
    stage = uniform(costs, schedule.num_stages)
    work = stage.forward + stage.backward
    num_steps = schedule.num_ranks - 1
    text = "(P-1)(F+B)/V"
    if (missing := schedule.num_ranks - schedule.num_microbatches) > 0:
        num_steps += missing * (schedule.num_chunks - 1)
        text += " + (P-M)(V-1)(F+B)/V"
    return Formula(text, num_steps * work, schedule.num_microbatches * schedule.num_chunks * work)
