"""Reduction: the gradients of a stage, summed over the replicas of the pipeline while the rank goes on."""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn

from stagewright.engine.locals import local_gradient, local_of, spread_like
from stagewright.engine.sharded import ShardedStage, is_reduced_by_itself
from stagewright.engine.transport.group import Group, Sum

# Gradients are summed in pieces of about this size: an all-reduce of one goes on while the next is gathered.
BUCKET_BYTES: Final = 25 * 2**20


class Reduction:
    """The gradients of a rank's stages, summed over the replicas.

    A gradient moves into its bucket when the sum begins, and is a part of that when it is done. A parameter that has a
    gradient on some replicas alone counts as zero on the others; one that has none anywhere keeps none. Of a tensor
    that is spread over other dimensions of the mesh, such as ``tp``, every rank sums its own part.

    Args:
        parameters: what is trained, by stage.
        group: the same rank of all replicas.
        sharded: the stages in which FSDP sums the gradients that it knows of.
        bucket_bytes: the size of a bucket, but for parameters that are larger.
    """

    def __init__(
        self,
        parameters: Mapping[int, Iterable[nn.Parameter]],
        group: Group,
        sharded: Mapping[int, ShardedStage] = MappingProxyType({}),
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._group = group
        self._sharded = sharded
        self._buckets = {
            stage: _buckets([one for one in of_stage if not is_reduced_by_itself(one)], bucket_bytes)
            for stage, of_stage in parameters.items()
        }
        self._under_way: dict[int, list[tuple[_Bucket, Sum]]] = {}

    @property
    def stages(self) -> Sequence[int]:
        """Those whose sums are under way."""
        return list(self._under_way)

    def start(self, stage: int) -> None:
        """Begin the sum of a stage's gradients."""
        if stage in self._sharded:
            self._sharded[stage].reduce()
        self._under_way[stage] = [(bucket, self._group.start_sum(bucket.collect())) for bucket in self._buckets[stage]]

    def finish(self, stage: int) -> bool:
        """Wait for it, and give the parameters the sum; False where none is under way."""
        buckets = self._under_way.pop(stage, None)
        for bucket, total in buckets or ():
            bucket.hand_out(total.wait())
        return buckets is not None

    def clear(self) -> None:
        """Forget the sums of a batch that has failed."""
        for stage in self._sharded.values():
            stage.clear()
        self._under_way.clear()


class _Bucket:
    """Some parameters of one type on one device.

    Behind their gradients it has a number for each: how many replicas have one.

    Args:
        parameters: which.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._shapes = [local_of(parameter).shape for parameter in parameters]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._has_own: list[bool] = []

    def collect(self) -> Tensor:
        """Move the gradients into one flat tensor.

        Raises:
            ValueError: one is sparse.
        """
        first, size = self._parameters[0], sum(self._sizes)
        flat = torch.zeros(size + len(self._sizes), dtype=first.dtype, device=first.device)
        self._has_own = [parameter.grad is not None for parameter in self._parameters]
        for parameter, shape, part in zip(self._parameters, self._shapes, torch.split(flat[:size], self._sizes)):
            gradient = local_gradient(parameter)
            if gradient is not None:
                _check_dense(gradient)
                part.view(shape).copy_(gradient)
                parameter.grad = None
        flat[size:] = torch.tensor(self._has_own, dtype=first.dtype, device=first.device)
        return flat

    def hand_out(self, total: Tensor) -> None:
        """Give every parameter its part of the sum, if any replica had something to add."""
        size = sum(self._sizes)
        has_any = self._has_own if all(self._has_own) else total[size:].ne(0).tolist()
        parts = torch.split(total[:size], self._sizes)
        for parameter, shape, part, has in zip(self._parameters, self._shapes, parts, has_any):
            parameter.grad = spread_like(parameter, part.view(shape)) if has else None


def _buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Deal parameters to buckets, those of each type and device in order."""
    buckets: list[list[nn.Parameter]] = []
    kinds = dict.fromkeys((parameter.dtype, parameter.device) for parameter in parameters)
    for kind in kinds:
        room = -math.inf
        for parameter in parameters:
            if (parameter.dtype, parameter.device) != kind:
                continue
            num_bytes = local_of(parameter).numel() * parameter.itemsize
            if num_bytes > room:
                buckets.append([])
                room = bucket_bytes
            buckets[-1].append(parameter)
            room -= num_bytes
    return [_Bucket(bucket) for bucket in buckets]


def _check_dense(gradient: Tensor) -> None:
    if gradient.is_sparse:
        raise ValueError(
            "gradients are summed over replicas in buckets, so they must be dense: got a sparse one; make its "
            "embedding with sparse=False"
        )
