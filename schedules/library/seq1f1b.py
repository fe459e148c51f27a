"""Seq1F1B: 1F1B over slices of the sequence, so that what fills the pipeline is smaller than a microbatch."""

from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.library.phases import one_forward_one_backward
from stagewright.schedules.library.uniform import uniform
from stagewright.schedules.registry import register
from stagewright.schedules.schedule import Order, Schedule, check_count


@register
@dataclass(frozen=True)
class SequenceSliced(Schedule):
    """1F1B in which each microbatch is cut into s slices along the sequence (Sun et al. 2024).

    Slices go forward first to last, since attention looks back, and so backward last to first. Instructions
    number slices as if they were microbatches: slice k of microbatch m is ``m * num_slices + k``; costs and
    stashes are those of one slice.

    ::

        rank 0  F0 F1 F2 F3 F4 .. .. .. .. .. .. B1 -- F5 B0 -- F6 B3 -- F7 B2 -- .. B5 -- .. B4 -- .. B7 -- B6 --
        rank 1  .. F0 F1 F2 F3 .. .. .. .. B1 -- F4 B0 -- F5 B3 -- F6 B2 -- F7 B5 -- .. B4 -- .. B7 -- B6 -- .. ..
        rank 2  .. .. F0 F1 F2 .. .. B1 -- F3 B0 -- F4 B3 -- F5 B2 -- F6 B5 -- F7 B4 -- .. B7 -- B6 -- .. .. .. ..
        rank 3  .. .. .. F0 F1 B1 -- F2 B0 -- F3 B3 -- F4 B2 -- F5 B5 -- F6 B4 -- F7 B7 -- B6 -- .. .. .. .. .. ..

    Args:
        num_slices: slices of each microbatch, s.
    """

    num_slices: int = 2

    name: ClassVar[str] = "seq1f1b"
    aliases: ClassVar[tuple[str, ...]] = ("seq-1f1b",)
    summary: ClassVar[str] = "1f1b over slices of the sequence; an s-th of the bubble (simulated and proved only)"
    runnable: ClassVar[bool] = False
    refusal: ClassVar[str] = (
        "the slices of a sequence share attention state: a slice's forward needs the keys and values of the slices "
        "before it, its backward the gradients from those behind it, which a stage that only maps its input to its "
        "output cannot hand over"
    )

    def check(self) -> None:
        """Any number of slices from 1 up will do."""
        check_count("num_slices", self.num_slices)

    @property
    def num_units(self) -> int:
        """Slices of one batch."""
        return self.num_microbatches * self.num_slices

    def order(self, rank: int) -> Order:
        """1F1B, with one microbatch's further slices forward before the last of them can go back."""
        forwards = [(rank, unit) for unit in range(self.num_units)]
        backwards = [
            (rank, microbatch * self.num_slices + part)
            for microbatch in range(self.num_microbatches)
            for part in reversed(range(self.num_slices))
        ]
        num_warmup = min(self.num_ranks - 1 - rank + self.num_slices - 1, self.num_units)
        return one_forward_one_backward(forwards, backwards, num_warmup)

    def bubble_formula(self, costs: Costs) -> Formula:
        """(P-1)(F+B)/s, for any number of microbatches."""
        stage = uniform(costs, self.num_stages)
        work = stage.forward + stage.backward
        return Formula("(P-1)(F+B)/s", (self.num_ranks - 1) * work, self.num_units * work)
