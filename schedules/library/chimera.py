"""Chimera: two 1F1B pipelines in opposite directions over the same ranks, or several such pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules.costs import Costs
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.formula import Formula
from stagewright.schedules.instructions import Backward, Computation, Forward
from stagewright.schedules.library.uniform import uniform
from stagewright.schedules.placement import Placement, bidirectional
from stagewright.schedules.registry import register
from stagewright.schedules.schedule import Order, Schedule, check_count


@register
@dataclass(frozen=True)
class Chimera(Schedule):
    """Half of the microbatches go down the ranks and half of them up (Li and Hoefler 2021, sections 3.1 to 3.3).

    ::

        GRID

    Args:
        num_pairs: pairs of opposite pipelines, f; they start P/f ranks apart. Each rank holds 2f stages.
    """

    num_pairs: int = 1

    name: ClassVar[str] = "chimera"
    summary: ClassVar[str] = "pipelines in both directions at once; half the bubble for two copies of the weights"

    def check(self) -> None:
        """Refuse odd numbers of ranks, and pairs that could not start at equal distances."""
        check_count("num_pairs", self.num_pairs)
        ranks, pairs = self.num_ranks, self.num_pairs
        if ranks % 2:
            nearest = f"{ranks - 1} or {ranks + 1}" if ranks > 1 else "2"
            raise ScheduleError(f"chimera needs an even number of ranks: got {ranks}; use {nearest}")
        if ranks // 2 % pairs:
            divisors = ", ".join(str(count) for count in range(1, ranks // 2 + 1) if ranks // 2 % count == 0)
            raise ScheduleError(
                f"chimera needs a number of pairs that divides half the ranks: got num_pairs={pairs} on {ranks} ranks; "
                f"use one of {divisors}"
            )

    @property
    def placement(self) -> Placement:
        """Pipeline i of those going down has its first stage on rank iP/f, of those going up on the rank before."""
        ranks, distance = range(self.num_ranks), self.num_ranks // self.num_pairs
        starts = range(0, self.num_ranks, distance)
        down = [tuple((start + stage) % self.num_ranks for stage in ranks) for start in starts]
        up = [tuple((start - 1 - stage) % self.num_ranks for stage in ranks) for start in starts]
        return bidirectional((*down, *up), self.num_microbatches)

    def order(self, rank: int) -> Order:
        """All computations of the rank by their slots, which are as long as a forward, and no two of which meet."""
        placement = self.placement
        of_route: list[list[int]] = [[] for _ in placement.routes]
        for microbatch, route in enumerate(placement.assignment):
            of_route[route].append(microbatch)
        most_down, most_up = max(map(len, of_route[: self.num_pairs])), max(map(len, of_route[self.num_pairs :]))
        num_rounds = -(-max(most_down, most_up) // self.round_size)
        down, up = self.rounds(most_down, num_rounds), self.rounds(most_up, num_rounds)
        down_forwards, up_backwards = self.alternate(down, up)
        up_forwards, down_backwards = self.alternate(up, down)
        slots: dict[int, Computation] = {}
        for route, microbatches in enumerate(of_route):
            stage = placement.routes[route].index(rank)
            is_down = route < self.num_pairs
            forwards, backwards = (down_forwards, down_backwards) if is_down else (up_forwards, up_backwards)
            for microbatch, forward, backward in zip(microbatches, forwards, backwards):
                slots[forward + stage] = Forward(stage, microbatch)
                slots[backward + self.num_ranks - 1 - stage] = Backward(stage, microbatch)
        return [slots[slot] for slot in sorted(slots)]

    @property
    def round_size(self) -> int:
        """Microbatches of a pipeline that follow each other closely: as many as fill P slots with all pairs together."""
        return self.num_ranks // (2 * self.num_pairs)

    def rounds(self, num_microbatches: int, num_rounds: int) -> list[int]:
        """How many microbatches of a pipeline each round takes: all that it can, the last one what is left."""
        size = self.round_size
        return [min(size, max(num_microbatches - round_ * size, 0)) for round_ in range(num_rounds)]

    def alternate(self, forwards: Sequence[int], backwards: Sequence[int]) -> tuple[list[int], list[int]]:
        """The slots in which one direction's forwards enter its first stage, the other's backwards its last.

        Rounds of either take turns, of the backwards the smallest first: then every turn is taken, from the
        first to the last, and yet no backward comes before its own forward.

        Args:
            forwards: sizes of the rounds of the one direction.
            backwards: sizes of the rounds of the other.
        """
        size = self.round_size
        turn, forward_turns, backward_turns = 0, [], []
        for num_forwards, num_backwards in zip(forwards, [*backwards[:-2], *reversed(backwards[-2:])]):
            forward_turns += range(turn, turn + num_forwards)
            turn = max(turn + num_forwards, size)
            backward_turns += range(turn, turn + num_backwards)
            turn += num_backwards
        return [self.slot(turn) for turn in forward_turns], [self.slot(turn) for turn in backward_turns]

    def slot(self, turn: int) -> int:
        """Every second slot is a turn, and each round of them leaves room for those of the other pairs."""
        round_, index = divmod(turn, self.round_size)
        return round_ * self.num_ranks + 2 * index
