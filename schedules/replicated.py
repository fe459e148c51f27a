"""Replicated: stages that several ranks compute by turns, each stage as many as it needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil, lcm
from numbers import Integral

from stagewright.schedules.asynchronous import Cell
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.placement import Placement
from stagewright.schedules.schedule import Schedule


@dataclass(frozen=True)
class Replication:
    """How many ranks each stage has, and who does what (1F1B-RR of PipeDream, Narayanan et al. 2019, section 3.2).

    The ranks of stage 0 come first, then those of stage 1, and so on. Of r replicas of a stage, number k computes the
    microbatches k, k + r, k + 2r, … of a batch, forward and backward.

    Args:
        counts: replicas of each stage.
    """

    counts: tuple[int, ...]

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each stage."""
        return tuple(accumulate(self.counts[:-1], initial=0))

    @cached_property
    def round(self) -> int:
        """Microbatches after which every stage is at its first replica again."""
        return lcm(*self.counts)

    @property
    def is_unequal(self) -> bool:
        """Whether some stages have more replicas than others."""
        return len(set(self.counts)) > 1

    def stage_of(self, rank: int) -> int:
        """The stage that a rank computes."""
        return next(stage for stage, first in reversed(list(enumerate(self.first_ranks))) if first <= rank)

    def cells(self, rank: int, num_microbatches: int) -> list[Cell]:
        """The (stage, microbatch) of one batch that a rank computes, in order; none where others have them all."""
        stage = self.stage_of(rank)
        replica = rank - self.first_ranks[stage]
        return [(stage, microbatch) for microbatch in range(replica, num_microbatches, self.counts[stage])]

    def num_warmup(self, stage: int) -> int:
        """Forwards in advance on each replica: as many as the next stage has in flight, dealt out to the replicas.

        With one replica each that is the number of stages behind this one. If s has w and the next stage, t, has v,
        w >= (v + 1) r_t / r_s: before its backward of a microbatch m, t has begun those up to m + v r_t, which s sends
        once it is through with the backward of m + v r_t - (w + 1) r_s, and that is at least r_s + r_t before m. So no
        rank waits in a circle; and where every stage takes a time in proportion to its replicas, a backward and a
        forward on both stages take just as long. PipeDream's own number, the share of a replica in all ranks from its
        stage on, is the same but for being rounded up once: where it was rounded up on the next stage, it is too low.
        """
        num_warmup = 0
        for own, following in reversed(list(pairwise(self.counts[stage:]))):
            num_warmup = ceil((num_warmup + 1) * following / own)
        return num_warmup

    def placement(self, num_microbatches: int) -> Placement:
        """One route for each microbatch of a round, taken by turns; every batch begins with the first one."""
        routes = [
            tuple(first + turn % count for first, count in zip(self.first_ranks, self.counts))
            for turn in range(self.round)
        ]
        if len(routes) == 1:
            return Placement(tuple(routes))
        return Placement(tuple(routes), tuple(microbatch % self.round for microbatch in range(num_microbatches)))


@dataclass(frozen=True)
class Replicated(Schedule):
    """A schedule with the option ``replicas``: ranks of each stage; one each where left out."""

    replicas: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.replicas, Sequence):
            object.__setattr__(self, "replicas", tuple(self.replicas))
        super().__post_init__()

    def check(self) -> None:
        """Every rank has a stage."""
        counts = self.replicas
        if not isinstance(counts, tuple):
            raise ScheduleError(f"replicas has one number a stage, such as (2, 1): got {counts!r}")
        if not all(isinstance(count, Integral) and not isinstance(count, bool) and count >= 1 for count in counts):
            raise ScheduleError(f"a stage has one replica or more: got replicas={counts}")
        if counts and sum(counts) != self.num_ranks:
            raise ScheduleError(
                f"every rank is a replica of one stage: replicas {'-'.join(map(str, counts))} are {sum(counts)} ranks, "
                f"got {self.num_ranks}; use {sum(counts)} ranks, or replicas that add up to {self.num_ranks}"
            )

    @cached_property
    def replication(self) -> Replication:
        """Who computes what."""
        return Replication(self.replicas or (1,) * self.num_ranks)

    @property
    def placement(self) -> Placement:
        """Stages in order, each on as many ranks as it has replicas."""
        return self.replication.placement(self.num_microbatches)

    def forwards(self, rank: int) -> Sequence[Cell]:
        """A rank's forwards of a batch, in order."""
        return self.replication.cells(rank, self.num_microbatches)

    def num_warmup(self, rank: int) -> int:
        """Forwards in advance of the first backward, in a batch that has enough of them."""
        return self.replication.num_warmup(self.replication.stage_of(rank))
