"""Asynchronous schedules: 1F1B that goes on from batch to batch, on weights that lag behind."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.instructions import Backward, Forward, Instruction, ReduceTied, Step, SyncScalars
from stagewright.schedules.schedule import Order, Schedule

Work: TypeAlias = Forward | Backward | Step | ReduceTied | SyncScalars


@dataclass(frozen=True)
class AsynchronousSchedule(Schedule, ABC):
    """1F1B without a flush: the pipeline stays full, and each microbatch computes with weights of a known version.

    A rank works in windows, one a batch: a window holds the batch's forwards, and the backwards that 1F1B puts
    between them, the first of which belong to the batch before. ``drain`` does the backwards that are left. A
    subclass says with which version a microbatch computes, and how many microbatches go into an update; the
    update follows right after the last backward that it needs.
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

    def window(self, rank: int, batch: int, num_drained: int = 0) -> list[Work]:
        """What a rank does when it is given a batch.

        Args:
            rank: whose window it is.
            batch: the batch's number, from 0.
            num_drained: batches before the last drain; their backwards are done.
        """
        num_warmup = self.num_ranks - 1 - rank
        oldest = num_drained * self.num_microbatches
        first = batch * self.num_microbatches
        work: list[Work] = []
        for microbatch in range(first, first + self.num_microbatches):
            work += [Forward(rank, microbatch, self.version(rank, microbatch, oldest))]
            if microbatch - num_warmup >= oldest:
                work += self._backward(rank, microbatch - num_warmup, oldest)
        return work

    def drain(self, rank: int, num_batches: int, num_drained: int = 0) -> list[Work]:
        """What a rank still has to do after the windows of ``num_batches`` batches, counted from the very first."""
        num_warmup = self.num_ranks - 1 - rank
        oldest = num_drained * self.num_microbatches
        end = num_batches * self.num_microbatches
        work: list[Work] = []
        for microbatch in range(max(end - num_warmup, oldest), end):
            work += self._backward(rank, microbatch, oldest)
        return work

    def _backward(self, rank: int, microbatch: int, oldest: int) -> list[Work]:
        """A backward, and the update where this was the last gradient that it needs."""
        backward = Backward(rank, microbatch, self.version(rank, microbatch, oldest))
        num_updates, rest = divmod(microbatch + 1, self.microbatches_per_update)
        return [backward] if rest else [backward, Step(rank, num_updates)]

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

    def bubble_formula(self, costs: Costs) -> Formula:
        """None once the pipeline is full: a batch takes M(F+B)."""
        stages = costs.of_stages(self.num_stages)
        return Formula("0", 0.0, self.num_microbatches * (max(stages.forward) + max(stages.backward)), "steady")
