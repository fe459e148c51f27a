"""Asynchronous schedules: 1F1B that goes on from batch to batch, on weights that lag behind."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.instructions import Backward, Forward, Instruction, ReduceGradient, Step
from stagewright.schedules.late_steps import Work
from stagewright.schedules.program import Program
from stagewright.schedules.schedule import Order, Schedule
from stagewright.schedules.windows import Windows

# (stage, microbatch of the batch)
Cell: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class AsynchronousSchedule(Schedule, ABC):
    """1F1B without a flush: the pipeline stays full, and each microbatch computes with weights of a known version.

    A rank works in windows, one a batch: a window holds the batch's forwards, and the backwards that 1F1B puts
    between them, the first of which belong to the batch before. ``drain`` does the backwards that are left. A
    subclass says with which version a microbatch computes, and how many microbatches go into an update; the
    update, of all stages of the rank, follows right after the last backward that it needs, behind the sums over
    replicas.
    """

    synchronous: ClassVar[bool] = False

    @property
    @abstractmethod
    def microbatches_per_update(self) -> int:
        """Microbatches whose gradients go into one update."""

    @abstractmethod
    def version(self, rank: int, microbatch: int, oldest: int) -> int:
        """The weight version with which a rank computes a microbatch, forward and backward.

        Args:
            rank: where it computes.
            microbatch: numbered through from the first batch on.
            oldest: the first microbatch after the last drain.
        """

    def forwards(self, rank: int) -> Sequence[Cell]:
        """A rank's forwards of a batch, in order: by default rank r has stage r alone."""
        return [(rank, microbatch) for microbatch in range(self.num_microbatches)]

    def backwards(self, rank: int) -> Sequence[Cell]:
        """A rank's backwards of a batch, in order: by default that of its forwards."""
        return self.forwards(rank)

    def num_warmup(self, rank: int) -> int:
        """By how many cells a rank's backwards lag behind its forwards: those that 1F1B computes before the first."""
        return self.num_ranks - 1 - rank

    def window(self, rank: int, batch: int, num_drained: int = 0) -> list[Work]:
        """What a rank does when it is given a batch.

        Args:
            rank: whose window it is.
            batch: the batch's number, from 0.
            num_drained: batches before the last drain; their backwards are done.
        """
        num_warmup, oldest = self.num_warmup(rank), num_drained * self.num_microbatches
        forwards = self.forwards(rank)
        end, first = (batch + 1) * len(forwards) - num_warmup, num_drained * len(forwards)
        backwards = self._backward_work(rank, end - len(forwards), end, first, oldest)
        work: list[Work] = []
        for (stage, index), backward in zip(forwards, backwards):
            microbatch = batch * self.num_microbatches + index
            work += [Forward(stage, microbatch, self.version(rank, microbatch, oldest)), *backward]
        return work

    def drain(self, rank: int, num_batches: int, num_drained: int = 0) -> list[Work]:
        """What a rank still has to do after the windows of ``num_batches`` batches, counted from the very first."""
        num_warmup, oldest = self.num_warmup(rank), num_drained * self.num_microbatches
        num_cells = len(self.backwards(rank))
        end, first = num_batches * num_cells, num_drained * num_cells
        backwards = self._backward_work(rank, end - num_warmup, end, first, oldest)
        return [instruction for backward in backwards for instruction in backward]

    def _backward_work(self, rank: int, begin: int, end: int, first: int, oldest: int) -> list[list[Work]]:
        """The backwards from one cell to another, each with the update where it makes the last gradient needed.

        Cells are numbered through from the first batch on; those before ``first`` were done before, and are empty.
        """
        cells, placement = self.backwards(rank), self.placement
        stages = placement.stages_of(rank)
        replicated = [stage for stage in stages if len(placement.replicas_of(stage)) > 1]
        per_update = len(cells) * self.microbatches_per_update // self.num_microbatches
        backwards: list[list[Work]] = []
        for number in range(begin, end):
            if number < first:
                backwards.append([])
                continue
            batch, index = divmod(number, len(cells))
            stage, microbatch = cells[index][0], cells[index][1] + batch * self.num_microbatches
            work: list[Work] = [Backward(stage, microbatch, self.version(rank, microbatch, oldest))]
            num_updates, rest = divmod(number + 1, per_update)
            if not rest:
                work += [ReduceGradient(stage) for stage in reversed(replicated)]
                work += [Step(stage, num_updates) for stage in stages]
            backwards.append(work)
        return backwards

    def order(self, rank: int) -> Order:
        """What a rank computes for a single batch that is then drained."""
        work = self.window(rank, 0) + self.drain(rank, 1)
        return [instruction for instruction in work if isinstance(instruction, Forward | Backward)]

    def streams(self, num_batches: int) -> tuple[tuple[Instruction, ...], ...]:
        """What every rank computes and updates in some batches and the drain after them, without communication."""
        streams: list[tuple[Instruction, ...]] = []
        for rank in range(self.num_ranks):
            work = [instruction for batch in range(num_batches) for instruction in self.window(rank, batch)]
            streams.append((*work, *self.drain(rank, num_batches)))
        return tuple(streams)

    def unverified(self, num_batches: int) -> Program:
        """The windows of some batches and the drain after them, as the engine runs them."""
        return Windows(self).program((num_batches,))

    def bubble_formula(self, costs: Costs) -> Formula | None:
        """None once the pipeline is full: a batch takes M(F+B), or as many times less as a stage has replicas."""
        stages, placement = costs.of_stages(self.num_stages), self.placement
        counts = [len(placement.replicas_of(stage)) for stage in range(self.num_stages)]
        if any(self.num_microbatches % count for count in counts):
            return None
        forward, backward = (
            max(cost * (self.num_microbatches // count) for cost, count in zip(of_stages, counts))
            for of_stages in (stages.forward, stages.backward)
        )
        return Formula("0", 0.0, forward + backward, "steady")
