"""Schedule: the small frozen object that says in which order each rank computes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import ClassVar, TypeAlias

from stagewright.schedules import updates
from stagewright.schedules.communication import insert_communication
from stagewright.schedules.costs import Costs
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.formula import Formula
from stagewright.schedules.instructions import (
    Backward,
    Computation,
    Forward,
    InputGradient,
    Instruction,
    Overlap,
    WeightGradient,
)
from stagewright.schedules.placement import Placement, linear
from stagewright.schedules.program import Program, UpdateRule
from stagewright.schedules.proof import complete, verify

Order: TypeAlias = Sequence[Computation | Overlap]


@dataclass(frozen=True)
class Schedule(ABC):
    """The order in which each rank computes one batch; all else is derived from it.

    A subclass gives ``name``, ``summary`` and ``order(rank)``, and its ``placement`` where that is not
    one stage a rank.

    Args:
        num_ranks: ranks of the pipeline, P.
        num_microbatches: microbatches of one batch, M.

    Raises:
        ScheduleError: the schedule cannot serve this shape.
    """

    num_ranks: int
    num_microbatches: int

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    summary: ClassVar[str]
    synchronous: ClassVar[bool] = True
    runnable: ClassVar[bool] = True
    refusal: ClassVar[str] = ""  # why the engine cannot run it, where it is not runnable

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Integral) and not isinstance(value, bool):  # those of numpy too
                object.__setattr__(self, field.name, int(value))
        check_count("num_ranks", self.num_ranks)
        check_count("num_microbatches", self.num_microbatches)
        self.check()

    def check(self) -> None:  # noqa: B027  # most schedules serve every shape
        """Refuse the shapes that this schedule cannot serve, with the rule, the numbers and the remedy."""

    @property
    def placement(self) -> Placement:
        """Which rank owns which stage: by default rank r owns stage r."""
        return linear(self.num_ranks)

    @property
    def num_stages(self) -> int:
        """Stages that the model must be cut into."""
        return self.placement.num_stages

    @property
    def num_units(self) -> int:
        """What instructions number as microbatches in one batch: M, or more where microbatches are cut into slices."""
        return self.num_microbatches

    @property
    def update_rule(self) -> UpdateRule:
        """When weights change: by default once a batch, after all of it."""
        return UpdateRule(self.num_units, (1,) * self.num_ranks)

    @abstractmethod
    def order(self, rank: int) -> Order:
        """What a rank computes for one batch, in order."""

    def bubble_formula(self, costs: Costs) -> Formula | None:
        """The bubble that theory promises under uniform costs, where a closed form is known for this shape."""
        return None

    def streams(self, num_batches: int) -> tuple[tuple[Instruction, ...], ...]:
        """What every rank computes and updates in the course of some batches, without communication."""
        placement = self.placement
        streams = []
        for rank in range(self.num_ranks):
            order = self.order(rank)
            stream: list[Instruction] = []
            for batch in range(num_batches):
                shifted = [shift(instruction, batch * self.num_units) for instruction in order] if batch else order
                stream += updates.update_after_batch(shifted, placement, rank, version=batch + 1)
            streams.append(tuple(stream))
        return tuple(streams)

    def program(self, steps: int = 1) -> Program:
        """The verified program of this schedule: computations, updates, sends and receives of every rank.

        Args:
            steps: batches to unroll, one after the other.
        """
        check_count("steps", steps)
        program = self.unverified(steps)
        verify(program)
        return program

    def unverified(self, num_batches: int) -> Program:
        """The same program, before anyone has proved it."""
        program = Program(self.streams(num_batches), self.placement, self.num_units, num_batches, self.update_rule)
        try:
            return insert_communication(program)
        except ScheduleError:
            return complete(program)  # the same, but a refusal shows which instructions wait for which


def check_count(field: str, count: object) -> None:
    """Refuse what is no count: anything but a whole number from 1 up."""
    if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
        raise ScheduleError(f"{field} is a whole number from 1 up: got {count!r}")


def shift(instruction: Computation | Overlap, microbatches: int) -> Computation | Overlap:
    """The same instruction for a later microbatch."""
    match instruction:
        case Overlap(forward, backward):
            return Overlap(
                Forward(forward.stage, forward.microbatch + microbatches, forward.version),
                Backward(backward.stage, backward.microbatch + microbatches, backward.version),
            )
        case Forward(stage, microbatch, version) | Backward(stage, microbatch, version):
            return type(instruction)(stage, microbatch + microbatches, version)
        case InputGradient(stage, microbatch, version) | WeightGradient(stage, microbatch, version):
            return type(instruction)(stage, microbatch + microbatches, version)
