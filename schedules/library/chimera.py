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
    """Half of the microbatches go down the ranks and half of them up (Li and Hoefler 2021, section 3).

    ::

        rank 0  F0 F1 .. f2 b2 -- f3 b3 -- .. B0 -- .. .. B1 --
        rank 1  .. F0 f2 F1 f3 .. b2 -- B0 -- b3 -- B1 -- .. ..
        rank 2  .. f2 F0 f3 F1 .. B0 -- b2 -- B1 -- b3 -- .. ..
        rank 3  f2 f3 .. F0 B0 -- F1 B1 -- .. b2 -- .. .. b3 --

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
        """Everything that the rank computes, by slots of one forward or backward each, none of them taken twice."""
        placement = self.placement
        of_route: list[list[int]] = [[] for _ in placement.routes]
        for microbatch, route in enumerate(placement.assignment):
            of_route[route].append(microbatch)
        num_down, num_up = max(map(len, of_route[: self.num_pairs])), max(map(len, of_route[self.num_pairs :]))
        num_rounds = -(-max(num_down, num_up) // self.round_size)
        down, up = self.rounds(num_down, num_rounds), self.rounds(num_up, num_rounds)
        down_forwards, up_backwards = self.alternate(down, up)
        up_forwards, down_backwards = self.alternate(up, down)
        slots: dict[int, Computation] = {}
        for route, microbatches in enumerate(of_route):
            stage = placement.routes[route].index(rank)
            goes_down = route < self.num_pairs
            forwards, backwards = (down_forwards, down_backwards) if goes_down else (up_forwards, up_backwards)
            for microbatch, forward, backward in zip(microbatches, forwards, backwards):
                slots[forward + stage] = Forward(stage, microbatch)
                slots[backward + self.num_ranks - 1 - stage] = Backward(stage, microbatch)
        return [slots[slot] for slot in sorted(slots)]

    @property
    def round_size(self) -> int:
        """Microbatches of a pipeline that go together: so many that all pipelines of a direction fill P/2 slots."""
        return self.num_ranks // (2 * self.num_pairs)

    def rounds(self, num_microbatches: int, num_rounds: int) -> list[int]:
        """How many microbatches of a pipeline each round takes: full rounds, then what is left."""
        size = self.round_size
        return [min(size, max(num_microbatches - turn * size, 0)) for turn in range(num_rounds)]

    def alternate(self, forwards: Sequence[int], backwards: Sequence[int]) -> tuple[list[int], list[int]]:
        """When one direction's forwards enter their first stage, and the other direction's backwards their last.

        A round of the one follows a round of the other. The smaller one at the end of the forwards comes after
        an equally small one of the backwards: so all slots are taken from the first to the last, and yet none of
        the backwards comes before its forward.

        Args:
            forwards: sizes of the one direction's rounds.
            backwards: sizes of the other's.
        """
        forward_turns: list[int] = []
        backward_turns: list[int] = []
        turn = 0
        for num_forwards, num_backwards in zip(forwards, [*backwards[:-2], *reversed(backwards[-2:])]):
            forward_turns += range(turn, turn + num_forwards)
            turn = max(turn + num_forwards, self.round_size)
            backward_turns += range(turn, turn + num_backwards)
            turn += num_backwards
        return [self.slot(turn) for turn in forward_turns], [self.slot(turn) for turn in backward_turns]

    def slot(self, turn: int) -> int:
        """Turns are two slots apart, for the other direction comes in between; rounds leave room for other pairs."""
        turns_before, turn_of_round = divmod(turn, self.round_size)
        return turns_before * self.num_ranks + 2 * turn_of_round

    def bubble_formula(self, costs: Costs) -> Formula | None:
        """(P/f-2)B, and between rounds (P/f-2)(B-F), for B >= F and M a multiple of P.

        With F = B that is the paper's fraction (P-2f)/(2fM+P-2f), which one pair keeps to for all M >= P.
        """
        stage, ranks, microbatches = uniform(costs, self.num_stages), self.num_ranks, self.num_microbatches
        forward, backward = stage.forward, stage.backward
        ideal = microbatches * (forward + backward)
        gap = ranks // self.num_pairs - 2
        if forward == backward and self.num_pairs == 1 and microbatches >= ranks:
            return Formula("(P/f-2)B", gap * backward, ideal)
        if forward > backward or microbatches % ranks:
            return None
        idle = gap * (backward + (microbatches // ranks - 1) * (backward - forward))
        return Formula("(P/f-2)(B+(M/P-1)(B-F))", idle, ideal)
