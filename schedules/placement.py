"""Placement: which rank owns which stage, for every microbatch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from stagewright.schedules.errors import ScheduleError


@dataclass(frozen=True)
class Placement:
    """A map from (stage, microbatch) to a rank.

    Args:
        routes: ``routes[route][stage]`` is the rank that owns the stage on that route. Most schedules
            have one route; a bidirectional one has two or more, each with its own copy of the weights, and so have
            stages with several replicas.
        assignment: ``assignment[microbatch]`` is the route of each microbatch of one batch; empty
            where there is one route.
    """

    routes: tuple[tuple[int, ...], ...]
    assignment: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.routes or not self.routes[0] or len({len(route) for route in self.routes}) > 1:
            raise ScheduleError(f"every route must place the same stages, at least one: got {self.routes}")
        if len(self.routes) > 1 and set(self.assignment) - set(range(len(self.routes))):
            raise ScheduleError(f"microbatches are assigned to routes 0..{len(self.routes) - 1}: got {self.assignment}")

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return len(self.routes[0])

    @cached_property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return 1 + max(max(route) for route in self.routes)

    @cached_property
    def num_chunks(self) -> int:
        """The most stages that one rank owns."""
        return max(len(self.stages_of(rank)) for rank in range(self.num_ranks))

    def route_of(self, microbatch: int) -> int:
        """The route that a microbatch takes; microbatches count on from batch to batch."""
        return self.assignment[microbatch % len(self.assignment)] if self.assignment else 0

    def rank_of(self, stage: int, microbatch: int = 0) -> int:
        """The rank that computes this stage for this microbatch."""
        return self.routes[self.route_of(microbatch)][stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank owns, in the model's order: chunk 0, chunk 1, …"""
        return tuple(stage for stage in range(self.num_stages) if any(route[stage] == rank for route in self.routes))

    def replicas_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a copy of this stage, in rising order."""
        return tuple(sorted({route[stage] for route in self.routes}))


def linear(num_ranks: int) -> Placement:
    """Rank r owns stage r."""
    return looped(num_ranks, 1)


def looped(num_ranks: int, num_chunks: int) -> Placement:
    """Rank r owns stages r, P + r, 2P + r, … (Megatron-LM's interleaving)."""
    return Placement((tuple(range(num_ranks)) * num_chunks,))


def waves(num_ranks: int, num_waves: int = 1) -> Placement:
    """Stages run down the ranks and back up again, once per wave (Hanayo; one wave is the V of ZB-V)."""
    down = tuple(range(num_ranks))
    return Placement(((down + down[::-1]) * num_waves,))


def bidirectional(routes: Sequence[tuple[int, ...]], num_microbatches: int) -> Placement:
    """Microbatches are dealt to the routes in equal contiguous shares, the first route first."""
    assignment = tuple(microbatch * len(routes) // num_microbatches for microbatch in range(num_microbatches))
    return Placement(tuple(routes), assignment)


# The placements that have a name of their own.
NAMES: Final = ("linear", "loop", "v", "wave", "bidirectional")


def named(name: str, num_ranks: int, num_stages: int, num_microbatches: int) -> Placement:
    """A placement by name.

    Args:
        name: one of ``NAMES``.
        num_ranks, num_stages: to be placed.
        num_microbatches: of one batch, half of which runs each way where the placement is bidirectional.

    Raises:
        ScheduleError: there is no such name, or so many stages cannot be placed like that.
    """
    num_chunks = -(-num_stages // num_ranks)
    match name:
        case "linear":
            placement = linear(num_ranks)
        case "loop":
            placement = looped(num_ranks, num_chunks)
        case "v":
            placement = waves(num_ranks)
        case "wave":
            placement = waves(num_ranks, -(-num_chunks // 2))
        case "bidirectional":
            route = tuple(range(num_ranks))
            placement = bidirectional((route, route[::-1]), num_microbatches)
        case _:
            raise ScheduleError(f"there is no placement {name!r}: there are {', '.join(NAMES)}", rule="placement")
    if placement.num_stages != num_stages:
        raise ScheduleError(
            f"{name} on {num_ranks} ranks has {placement.num_stages} stages, but here are {num_stages}",
            rule="placement",
        )
    return placement
