"""PipeDream-2BW: an update a batch, on weights that are one update old, so that two versions are enough."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.asynchronous import AsynchronousSchedule
from stagewright.schedules.costs import Costs
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.formula import Formula
from stagewright.schedules.program import UpdateRule
from stagewright.schedules.registry import register
from stagewright.schedules.replicated import Replicated


@dataclass(frozen=True)
class TwoVersions(AsynchronousSchedule):
    """An update a batch, computed with the weights that the one before it began with."""

    @property
    def microbatches_per_update(self) -> int:
        """Every batch makes an update."""
        return self.num_microbatches

    @property
    def update_rule(self) -> UpdateRule:
        """Two versions everywhere, each gradient one update old."""
        return UpdateRule(self.num_microbatches, (2,) * self.num_ranks, max_staleness=1)

    def version(self, rank: int, microbatch: int, oldest: int) -> int:
        """The version that the batch before the one before this made."""
        return max(microbatch // self.num_microbatches - 1, 0)

    def check_exists(self) -> None:
        """With fewer than P-1 microbatches a version would be read before it exists."""
        if self.num_microbatches < self.num_ranks - 1:
            raise ScheduleError(
                f"{self.name} needs at least P - 1 microbatches, so that a batch's version exists when its first "
                f"forward reads it: got {self.num_microbatches} on {self.num_ranks} ranks; use {self.num_ranks - 1} or "
                f"more microbatches, or at most {self.num_microbatches + 1} ranks"
            )


@register
@dataclass(frozen=True)
class DoubleBuffered(Replicated, TwoVersions):
    """1F1B without a flush, an update a batch, two weight versions (PipeDream-2BW, Narayanan et al. 2021, section 3.1).

    Batch t runs forward and backward on version max(t-1, 0) everywhere, and makes version t+1 from version t:
    W(t+1) = W(t) - lr * g(W(t-1)). A drain does not restart the rule. Here are two batches, drained; ``|`` is an
    update:

    ::

        rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 -- F4 B1 -- F5 B2 -- F6 B3 --|F7 B4 -- .. B5 -- .. B6 -- .. B7 --
        rank 1  .. F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- F4 B2 -- F5 B3 --|F6 B4 -- F7 B5 -- .. B6 -- .. B7 -- .. ..
        rank 2  .. .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- F4 B3 --|F5 B4 -- F6 B5 -- F7 B6 -- .. B7 -- .. .. .. ..
        rank 3  .. .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --|F4 B4 -- F5 B5 -- F6 B6 -- F7 B7 -- .. .. .. .. .. ..

    With ``replicas``, the gradient of a batch is summed over the replicas of a stage as soon as each is through with
    its share, and the update follows where its version is first read, or where the next sum begins: until then the
    other replicas have time. Each replica must have at least as many microbatches of a batch as it forwards in advance,
    and at least one; with one more than it forwards in advance, none waits for another.

    Args:
        replicas: ranks of each stage, such as (2, 1), which take its microbatches by turns; one each where left out.
    """

    name: ClassVar[str] = "2bw"
    aliases: ClassVar[tuple[str, ...]] = ("pipedream-2bw",)
    summary: ClassVar[str] = "an update a batch on weights one update old, no flush; two weight versions"

    def check(self) -> None:
        """A version must be there before it is read."""
        super().check()
        if not self.replicas:
            self.check_exists()
            return
        counts = self.replication.counts
        least = max(count * max(self.replication.num_warmup(stage), 1) for stage, count in enumerate(counts))
        if self.num_microbatches < least:
            raise ScheduleError(
                f"{self.name} needs a microbatch for each forward that the replicas of a stage do in advance, and one "
                f"for each replica, so that a batch's version exists when its first forward reads it: got "
                f"{self.num_microbatches} for replicas {'-'.join(map(str, counts))}; use {least} or more"
            )

    def bubble_formula(self, costs: Costs) -> Formula | None:
        """None once the pipeline is full, if updates do not wait for replicas that are a microbatch later."""
        replication = self.replication
        for stage, count in enumerate(replication.counts):
            spare = self.num_microbatches // count - replication.num_warmup(stage)
            if count > 1 and replication.is_unequal and spare < 1:
                return None
        return super().bubble_formula(costs)
