"""Gradients: those of one rank, from the first backward of a batch to the update."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from stagewright.engine.agreement import Scalars
from stagewright.engine.replicas import Replicas
from stagewright.engine.ties import Ties
from stagewright.engine.weights import StageWeights
from stagewright.schedules import Placement


class Gradients:
    """The gradients of a rank's weights.

    Those of earlier batches, which the trainer has accumulated, are set aside while a batch runs: sums over replicas
    and ties, and the division by what a loss averages over, concern the new ones alone.

    Args:
        weights: whose gradients, by stage.
        replicas, ties: sum them over copies on other ranks.
        placement, rank: tell which rank counts a replicated weight in a norm.
    """

    def __init__(
        self, weights: Mapping[int, StageWeights], replicas: Replicas, ties: Ties, placement: Placement, rank: int
    ) -> None:
        self._replicas = replicas
        self._ties = ties
        # Those of earlier batches while a batch runs; None between batches.
        self._earlier: dict[nn.Parameter, Tensor] | None = None
        self._all = [parameter for of_stage in weights.values() for parameter in of_stage.trained.values()]
        repeated = ties.repeated()
        self._counted = [
            parameter
            for stage, of_stage in weights.items()
            if placement.replicas_of(stage)[0] == rank
            for parameter in of_stage.trained.values()
            if parameter not in repeated
        ]

    def begin(self) -> None:
        """Set aside what earlier batches left."""
        self._earlier = {parameter: parameter.grad for parameter in self._all if parameter.grad is not None}
        for parameter in self._earlier:
            parameter.grad = None

    def reduce(self, stage: int) -> None:
        """Start the sum over the copies of a stage."""
        self._replicas.start(stage)

    def reduce_tied(self, stage: int) -> None:
        """Start the sum over the stages that share a weight with this one."""
        self._replicas.finish(stage)
        self._ties.start(stage)

    def complete(self, *, counted: bool = False) -> None:
        """Wait for every sum that was started; only for those that this rank counts in a norm, if so wanted."""
        self._replicas.finish_all()
        self._ties.finish(counted=counted)

    def measure(self) -> Scalars:
        """What this rank contributes to the norm of all ranks' gradients."""
        before = self._earlier or {}
        pairs = [(before.get(parameter), parameter.grad) for parameter in self._counted]
        new = _sum_of_products([(n, n) for _, n in pairs])
        earlier = _sum_of_products([(e, e) for e, _ in pairs])
        mixed = _sum_of_products(pairs)
        overflow = not all(map(math.isfinite, (new, earlier, mixed)))
        return Scalars(earlier=earlier, mixed=mixed, new=new, overflow=overflow)

    def settle(self, factor: float = 1.0) -> None:
        """Multiply the new gradients by a factor and add those that were set aside."""
        self.scale(factor)
        for parameter, earlier in (self._earlier or {}).items():
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._earlier = None

    def discard(self) -> None:
        """Drop the new gradients; those that were set aside are there again."""
        if self._earlier is not None:
            for parameter in self._all:
                parameter.grad = self._earlier.get(parameter)
        self._earlier = None

    def scale(self, factor: float) -> None:
        """Multiply the gradients by a factor."""
        gradients = [parameter.grad for parameter in self._all if parameter.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)

    def drop(self) -> None:
        """Drop all gradients, those set aside too."""
        self._earlier = None
        for parameter in self._all:
            parameter.grad = None

    def forget_batch(self) -> None:
        """Leave things as they were before a batch that has failed."""
        self._replicas.clear()
        self._ties.clear()
        self.discard()


def _sum_of_products(pairs: Sequence[tuple[Tensor | None, Tensor | None]]) -> float:
    """The sum over all elements of all pairs, in double precision."""
    products = [_product(left, right) for left, right in pairs if left is not None and right is not None]
    return float(torch.stack(products).sum()) if products else 0.0  # one wait for the device, not one a parameter


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The sum over all elements of two gradients, which are dense or sparse each."""
    if left is right:
        elements = left.coalesce().values() if left.is_sparse else left
        norm: Tensor = torch.linalg.vector_norm(elements, dtype=_double(elements))
        return norm.double().square()
    left, right = (gradient.to_dense() if gradient.is_sparse else gradient for gradient in (left, right))
    product: Tensor = torch.vdot(left.reshape(-1).to(_double(left)), right.reshape(-1).to(_double(right))).real
    return product


def _double(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
