"""PipeDream: an update after every microbatch, each microbatch on the version that its forward found."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import ClassVar

from stagewright.schedules.asynchronous import AsynchronousSchedule
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.program import UpdateRule
from stagewright.schedules.registry import register
from stagewright.schedules.replicated import Replicated


@register
@dataclass(frozen=True)
class PipeDream(Replicated, AsynchronousSchedule):
    """1F1B without a flush, an update after every microbatch, weights stashed (Narayanan et al. 2019, section 3.3).

    A forward uses the newest version on its rank, and its backward the same one: update j since the last drain
    lags min(j, P-1-r) updates behind on rank r. Here are two batches, drained; ``|`` is an update:

    ::

        rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 --|F4 B1 --|F5 B2 --|F6 B3 --|F7 B4 --|.. B5 --|.. B6 --|.. B7 --
        rank 1  .. F0 F1 F2 .. .. .. .. B0 --|F3 B1 --|F4 B2 --|F5 B3 --|F6 B4 --|F7 B5 --|.. B6 --|.. B7 -- .. ..
        rank 2  .. .. F0 F1 .. .. B0 --|F2 B1 --|F3 B2 --|F4 B3 --|F5 B4 --|F6 B5 --|F7 B6 --|.. B7 -- .. .. .. ..
        rank 3  .. .. .. F0 B0 --|F1 B1 --|F2 B2 --|F3 B3 --|F4 B4 --|F5 B5 --|F6 B6 --|F7 B7 -- .. .. .. .. .. ..

    With ``replicas``, an update after one microbatch would leave the other replicas of its stage behind; PipeDream,
    too, sums the gradients of all replicas before each update. So every stage makes an update after L microbatches, the
    least common multiple of the replicas, when all replicas have had as many turns, with the mean gradient of these.
    All of them use one version, d updates older than the newest when it is applied: d is the number of rounds of L in
    which a replica does its w forwards in advance, or w + 1 where it has others to wait for, since those may be a turn
    later. A batch is whole rounds.

    Args:
        vertical_sync: every rank uses the version that the first rank used, and all keep P versions; or, with
            replicas, that of the stage with the largest d, and d + 1 versions.
        replicas: ranks of each stage, such as (2, 1), which take its microbatches by turns; one each where left out.
    """

    vertical_sync: bool = False

    name: ClassVar[str] = "pipedream"
    aliases: ClassVar[tuple[str, ...]] = ("weight-stashing",)
    summary: ClassVar[str] = "an update after every microbatch, no flush; stashes up to P weight versions"

    def check(self) -> None:
        """A batch is whole rounds."""
        super().check()
        size = self.replication.round
        if self.num_microbatches % size:
            counts, fewer = "-".join(map(str, self.replicas)), self.num_microbatches // size * size
            remedy = f"{fewer} or {fewer + size}" if fewer else str(size)
            raise ScheduleError(
                f"{self.name} makes an update whenever all replicas of every stage have had their turn: with replicas "
                f"{counts} after {size} microbatches, got {self.num_microbatches} a batch; use {remedy}"
            )

    @property
    def microbatches_per_update(self) -> int:
        """Every microbatch makes an update, or every round over the replicas."""
        return self.replication.round

    @property
    def update_rule(self) -> UpdateRule:
        """One version more than gradients lag updates behind."""
        num_versions = tuple(delay + 1 for delay in self.delays)
        return UpdateRule(self.microbatches_per_update, num_versions, max_staleness=max(self.delays))

    @cached_property
    def delays(self) -> tuple[int, ...]:
        """Updates by which each rank's gradients lag behind, once the pipeline is full."""
        of_stages = [self._delay(stage) for stage in range(self.num_stages)]
        if self.vertical_sync:
            return (max(of_stages),) * self.num_ranks
        return tuple(of_stages[self.replication.stage_of(rank)] for rank in range(self.num_ranks))

    def _delay(self, stage: int) -> int:
        replication = self.replication
        per_update = replication.round // replication.counts[stage]
        num_warmup = replication.num_warmup(stage)
        if replication.counts[stage] > 1 and replication.is_unequal:
            num_warmup += 1  # more than its own: the other replicas are up to one microbatch later
        return ceil(num_warmup / per_update)

    def version(self, rank: int, microbatch: int, oldest: int) -> int:
        """The newest on this rank, or on the one with the oldest, when the first microbatch of its round arrives."""
        per_update = self.microbatches_per_update
        return max(microbatch // per_update - self.delays[rank], oldest // per_update)
