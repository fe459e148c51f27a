"""PipeDream: an update after every microbatch, each microbatch on the version that its forward found."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.asynchronous import AsynchronousSchedule
from stagewright.schedules.program import UpdateRule
from stagewright.schedules.registry import register


@register
@dataclass(frozen=True)
class PipeDream(AsynchronousSchedule):
    """1F1B without a flush, an update after every microbatch, weights stashed (Narayanan et al. 2019, section 3.3).

    A forward uses the newest version on its rank, and its backward the same one: update j since the last drain
    lags min(j, P-1-r) updates behind on rank r. Here are two batches, drained; ``|`` is an update:

    ::

        rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 --|F4 B1 --|F5 B2 --|F6 B3 --|F7 B4 --|.. B5 --|.. B6 --|.. B7 --
        rank 1  .. F0 F1 F2 .. .. .. .. B0 --|F3 B1 --|F4 B2 --|F5 B3 --|F6 B4 --|F7 B5 --|.. B6 --|.. B7 -- .. ..
        rank 2  .. .. F0 F1 .. .. B0 --|F2 B1 --|F3 B2 --|F4 B3 --|F5 B4 --|F6 B5 --|F7 B6 --|.. B7 -- .. .. .. ..
        rank 3  .. .. .. F0 B0 --|F1 B1 --|F2 B2 --|F3 B3 --|F4 B4 --|F5 B5 --|F6 B6 --|F7 B7 -- .. .. .. .. .. ..

    Args:
        vertical_sync: every rank uses the version that the first rank used, and all keep P versions.
    """

    vertical_sync: bool = False

    name: ClassVar[str] = "pipedream"
    aliases: ClassVar[tuple[str, ...]] = ("weight-stashing",)
    summary: ClassVar[str] = "an update after every microbatch, no flush; stashes up to P weight versions"

    @property
    def microbatches_per_update(self) -> int:
        """Every microbatch makes an update."""
        return 1

    @property
    def update_rule(self) -> UpdateRule:
        """P-r versions on rank r, or P on all of them."""
        ranks = range(self.num_ranks)
        num_versions = tuple(self.num_ranks if self.vertical_sync else self.num_ranks - rank for rank in ranks)
        return UpdateRule(1, num_versions, max_staleness=self.num_ranks - 1)

    def version(self, rank: int, microbatch: int, oldest: int) -> int:
        """The newest on this rank, or on the first one, when the microbatch arrives there."""
        num_in_flight = self.num_ranks - 1 - (0 if self.vertical_sync else rank)
        return max(microbatch - num_in_flight, oldest)
