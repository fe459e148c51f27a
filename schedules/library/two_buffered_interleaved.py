"""Interleaved PipeDream-2BW: two weight versions, no flush, several stages a rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.asynchronous import Cell
from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.library.looped import Grouped
from stagewright.schedules.library.two_buffered import TwoVersions
from stagewright.schedules.library.uniform import uniform
from stagewright.schedules.registry import register


@register
@dataclass(frozen=True)
class InterleavedDoubleBuffered(TwoVersions, Grouped):
    """PipeDream-2BW over several stages a rank, in groups of N microbatches.

    Batch t runs on version max(t-1, 0) on all stages, as in ``2bw``, and the stages of a rank are updated together. Two
    versions are enough here too: a rank's MV cells of a batch come before those of the next, forwards and backwards, and
    its backwards lag (V-1)N + P-1-r cells behind. So the last backward of a batch, and with it the update, comes before
    the first forward of the batch after the next, which reads what the update makes, if (V-1)N + P-1 <= MV. Since
    N <= M, this holds wherever M >= P-1. The lag is less than that of ``interleaved``, where rank r does P-1-r more
    forwards in advance: a pipeline that does not drain needs none of them to keep its ranks busy.

    There is no bubble left that smaller stages could shrink. What they make smaller is the time to fill and to drain,
    for (V-1)N more stashes, of a V-th of a rank's layers each, and V times the sends. With M = P-1 a microbatch comes back
    to the first rank too late, unless F/(P-1) <= B <= (P-1)F. Here are two batches, drained; ``|`` is an update:

    ::

        rank 0  F0 F1 F2 F3 f0 f1 f2 f3 .. .. .. .. .. .. b0 -- F4 b1 -- F5 b2 -- F6 b3 -- F7 B0 -- f4 B1 -- f5 B2 -- f6 B3 --|f7 b4 -- .. b5 -- .. b6 -- .. b7 -- B4 -- B5 -- B6 -- B7 --
        rank 1  .. F0 F1 F2 F3 f0 f1 f2 .. .. .. .. b0 -- f3 b1 -- F4 b2 -- F5 b3 -- F6 B0 -- F7 B1 -- f4 B2 -- f5 B3 --|f6 b4 -- f7 b5 -- .. b6 -- .. b7 -- B4 -- B5 -- B6 -- B7 -- .. ..
        rank 2  .. .. F0 F1 F2 F3 f0 f1 .. .. b0 -- f2 b1 -- f3 b2 -- F4 b3 -- F5 B0 -- F6 B1 -- F7 B2 -- f4 B3 --|f5 b4 -- f6 b5 -- f7 b6 -- .. b7 -- B4 -- B5 -- B6 -- B7 -- .. .. .. ..
        rank 3  .. .. .. F0 F1 F2 F3 f0 b0 -- f1 b1 -- f2 b2 -- f3 b3 -- F4 B0 -- F5 B1 -- F6 B2 -- F7 B3 --|f4 b4 -- f5 b5 -- f6 b6 -- f7 b7 -- B4 -- B5 -- B6 -- B7 -- .. .. .. .. .. ..
    """  # noqa: E501

    name: ClassVar[str] = "2bw-interleaved"
    aliases: ClassVar[tuple[str, ...]] = ("interleaved-2bw",)
    summary: ClassVar[str] = "2bw over V stages a rank: fills and drains in smaller steps, for more stashes and sends"

    def check(self) -> None:
        """The group size must be legal, and a version be there before it is read."""
        Grouped.check(self)
        self.check_exists()

    def forwards(self, rank: int) -> Sequence[Cell]:
        """Group by group, in each chunk by chunk."""
        return self.forward_cells(rank, self.group)

    def backwards(self, rank: int) -> Sequence[Cell]:
        """Group by group, in each from the last chunk to the first."""
        return self.backward_cells(rank, self.group)

    def num_warmup(self, rank: int) -> int:
        """The forwards of a group on all chunks but the last, and those under way to the last rank."""
        return (self.num_chunks - 1) * self.group + self.num_ranks - 1 - rank

    def bubble_formula(self, costs: Costs) -> Formula | None:
        """None once the pipeline is full; where M = P-1 comes too late, no closed form is known."""
        stage, num_steps = uniform(costs, self.num_stages), self.num_ranks - 1
        in_time = stage.forward <= num_steps * stage.backward and stage.backward <= num_steps * stage.forward
        if self.num_microbatches < self.num_ranks and self.num_chunks > 1 and not in_time:
            return None
        return Formula("0", 0.0, self.num_microbatches * self.num_chunks * (stage.forward + stage.backward), "steady")
