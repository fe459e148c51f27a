"""Gradients: those of one rank, from the first backward of a batch to the update."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from stagewright.engine.agreement import Scalars
from stagewright.engine.replicas import Replicas
from stagewright.engine.ties import Ties
from stagewright.engine.weights import Weights
from stagewright.schedules import Placement


class Gradients:
    """The gradients of a rank's weights.

    Those of earlier batches, which the trainer has accumulated, are set aside while a batch runs: sums over replicas
    and ties, and the division by what a loss averages over, concern the new ones alone.

    Args:
        weights: whose gradients.
        replicas, ties: sum them over copies on other ranks.
        placement, rank: tell which rank counts a replicated weight in a norm.
    """

    def __init__(self, weights: Weights, replicas: Replicas, ties: Ties, placement: Placement, rank: int) -> None:
        self._weights = weights
        self._replicas = replicas
        self._ties = ties
        self._earlier: dict[nn.Parameter, Tensor] = {}
        repeated = ties.repeated()
        self._counted = [
            parameter
            for stage, trained in weights.trained.items()
            if placement.replicas_of(stage)[0] == rank
            for parameter in trained.values()
            if parameter not in repeated
        ]

    def begin(self) -> None:
        """Set aside what earlier batches left."""
        for parameter in self._weights.all():
            if parameter.grad is not None:
                self._earlier[parameter] = parameter.grad
                parameter.grad = None

    def reduce(self, stage: int) -> None:
        """Start the sum over the copies of a stage."""
        self._replicas.start(stage)

    def reduce_tied(self, stage: int) -> None:
        """Start the sum over the stages that share a weight with this one."""
        self._replicas.finish(stage)
        self._ties.start(stage)

    def complete(self) -> None:
        """Wait for every sum that was started."""
        self._replicas.finish_all()
        self._ties.finish()

    def measure(self, count: float, *, counts: bool) -> Scalars:
        """What this rank contributes to the agreement on the update."""
        own = [(self._earlier.get(parameter), parameter.grad) for parameter in self._counted]
        new = _dot([(n, n) for _, n in own])
        earlier = _dot([(e, e) for e, _ in own])
        mixed = _dot([(e, n) for e, n in own])
        overflow = not all(math.isfinite(value) for value in (new, earlier, mixed))
        return Scalars(count, earlier, mixed, new, counts, overflow)

    def settle(self, factor: float = 1.0) -> None:
        """Multiply the new gradients by a factor and add those that were set aside."""
        new = [parameter.grad for parameter in self._weights.all() if parameter.grad is not None]
        if factor != 1.0 and new:
            torch._foreach_mul_(new, factor)
        for parameter, earlier in self._earlier.items():
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._earlier.clear()

    def scale(self, factor: float) -> None:
        """Multiply all gradients by a factor."""
        gradients = [parameter.grad for parameter in self._weights.all() if parameter.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)

    def drop(self) -> None:
        """Forget all gradients, those set aside too."""
        self._earlier.clear()
        for parameter in self._weights.all():
            parameter.grad = None


def _dot(pairs: list[tuple[Tensor | None, Tensor | None]]) -> float:
    """The sum of all products, in double precision."""
    products = [
        torch.linalg.vecdot(left.flatten(), right.flatten()).double() if left.numel() else None
        for left, right in pairs
        if left is not None and right is not None
    ]
    found = [product for product in products if product is not None]
    return float(torch.stack(found).sum()) if found else 0.0
