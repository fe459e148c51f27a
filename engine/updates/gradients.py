"""Gradients: those of one rank, from the first backward of a batch to the update."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stagewright.engine.locals import groups_of, local_of, settle_gradient
from stagewright.engine.transport.collective import CollectiveGroup
from stagewright.engine.transport.group import Group, start_numbers
from stagewright.engine.updates.agreement import Scalars
from stagewright.engine.updates.reduction import Reduction
from stagewright.engine.updates.replicas import Replicas
from stagewright.engine.updates.ties import Ties
from stagewright.engine.updates.weights import StageWeights
from stagewright.schedules import Placement


class Gradients:
    """The gradients of a rank's weights.

    Those of earlier batches, which the trainer has accumulated, are set aside while a batch runs: sums over replicas
    and ties, and the division by what a loss averages over, concern the new ones alone.

    Sums follow each other: over the replicas of the whole pipeline, over the copies of a stage within it, and over the
    stages that share a weight. So each has the same numbers to add on all its ranks, and makes the same of them.

    Args:
        weights: whose gradients, by stage.
        reduction: sums them over the replicas of the pipeline; None where that has none.
        replicas, ties: sum them over copies on other ranks.
        placement, rank: tell which rank counts a replicated weight in a norm.
    """

    def __init__(
        self,
        weights: Mapping[int, StageWeights],
        reduction: Reduction | None,
        replicas: Replicas,
        ties: Ties,
        placement: Placement,
        rank: int,
    ) -> None:
        self._reduction = reduction
        self._replicas = replicas
        self._ties = ties
        # Those of earlier batches while a batch runs; None between batches.
        self._earlier: dict[nn.Parameter, Tensor] | None = None
        self._all = [parameter for of_stage in weights.values() for parameter in of_stage.trained.values()]
        repeated = ties.repeated()
        counted = [
            parameter
            for stage, of_stage in weights.items()
            if placement.replicas_of(stage)[0] == rank
            for parameter in of_stage.trained.values()
            if parameter not in repeated
        ]
        by_groups: dict[Sequence[dist.ProcessGroup], list[nn.Parameter]] = {}
        for parameter in counted:
            by_groups.setdefault(groups_of(parameter), []).append(parameter)
        # What counts in a norm, with the groups of ranks each of which has a part of it.
        self._counted = [
            ([CollectiveGroup(group, parameters[0].device) for group in groups], parameters)
            for groups, parameters in by_groups.items()
        ]

    def begin(self) -> None:
        """Set aside what earlier batches left."""
        self._earlier = {parameter: parameter.grad for parameter in self._all if parameter.grad is not None}
        for parameter in self._earlier:
            parameter.grad = None

    def reduce(self, stage: int) -> None:
        """Start the sum over the copies of a stage."""
        if self._reduction is None:
            self._replicas.start(stage)
        else:
            self._reduction.start(stage)

    def reduce_tied(self, stage: int) -> None:
        """Start the sum over the stages that share a weight with this one."""
        self._finish_reductions([stage])
        self._replicas.finish(stage)
        self._ties.start(stage)

    def complete(self, *, counted: bool = False) -> None:
        """Wait for every sum that was started; only for those that this rank counts in a norm, if so wanted."""
        if self._reduction is not None:
            self._finish_reductions(self._reduction.stages)
        self._replicas.finish_all()
        self._ties.finish(counted=counted)

    def _finish_reductions(self, stages: Sequence[int]) -> None:
        """Wait for the sums over the replicas of the pipeline, and start those over the copies in this one."""
        if self._reduction is None:
            return
        for stage in stages:
            if self._reduction.finish(stage):
                self._replicas.start(stage)

    def measure(self) -> Scalars:
        """What this rank contributes to the norm of all ranks' gradients."""
        before = self._earlier or {}
        new = earlier = mixed = 0.0
        for groups, parameters in self._counted:
            for parameter in parameters:
                settle_gradient(parameter)
            pairs = [(before.get(parameter), parameter.grad) for parameter in parameters]
            sums = [_sum_of_products([(n, n) for _, n in pairs]), _sum_of_products([(e, e) for e, _ in pairs])]
            of_new, of_earlier, of_both = _add_over(groups, [*sums, _sum_of_products(pairs)])
            new, earlier, mixed = new + of_new, earlier + of_earlier, mixed + of_both
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
        gradients = [local_of(parameter.grad) for parameter in self._all if parameter.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)

    def drop(self) -> None:
        """Drop all gradients, those set aside too."""
        self._earlier = None
        for parameter in self._all:
            parameter.grad = None

    def forget_batch(self) -> None:
        """Leave things as they were before a batch that has failed."""
        if self._reduction is not None:
            self._reduction.clear()
        self._replicas.clear()
        self._ties.clear()
        self.discard()


def _add_over(groups: Sequence[Group], numbers: Sequence[float]) -> Sequence[float]:
    """Numbers that each rank has for its part, added up over the ranks of some groups."""
    for group in groups:
        numbers = start_numbers(group, numbers).wait().tolist()
    return numbers


def _sum_of_products(pairs: Sequence[tuple[Tensor | None, Tensor | None]]) -> float:
    """The sum over all elements of all pairs, in double precision."""
    products = [_product(left, right) for left, right in pairs if left is not None and right is not None]
    return float(torch.stack(products).sum()) if products else 0.0  # one wait for the device, not one a parameter


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The sum over all elements that are here of two gradients, which are dense or sparse each."""
    is_one = left is right
    left, right = local_of(left), local_of(right)
    if is_one:
        elements = left.coalesce().values() if left.is_sparse else left
        norm: Tensor = torch.linalg.vector_norm(elements, dtype=_double(elements))
        return norm.double().square()
    left, right = (gradient.to_dense() if gradient.is_sparse else gradient for gradient in (left, right))
    product: Tensor = torch.vdot(left.reshape(-1).to(_double(left)), right.reshape(-1).to(_double(right))).real
    return product


def _double(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
