"""Reduction: gradients in buckets, summed over replicas; parameters without a gradient; what is refused."""

from typing import Any

import pytest
import torch
from launching import launch_on
from torch import nn

from stagewright.engine import RankContext, make_mesh
from stagewright.engine.mesh import connect
from stagewright.engine.updates.reduction import Reduction

SHAPES = ((3, 2), (), (5,), (2, 2))
DTYPES = (torch.float64, torch.bfloat16, torch.float64, torch.complex128)


def parameters_of(rank: int) -> list[nn.Parameter]:
    """Parameters with gradients; the third has one on rank 0 alone, and the last one nowhere."""
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in zip(SHAPES, DTYPES)]
    parameters.append(nn.Parameter(torch.zeros(4, dtype=torch.float64)))
    for index, parameter in enumerate(parameters[:4]):
        if index != 2 or rank == 0:
            parameter.grad = torch.full_like(parameter, (rank + 1) * 10**index)
    return parameters


class Counted:
    """A group that counts its sums."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size, self.device = group.rank, group.size, group.device
        self.num_elements: list[int] = []

    def start_sum(self, tensor: torch.Tensor) -> Any:
        self.num_elements.append(tensor.numel())
        return self._group.start_sum(tensor)

    def abort(self, reason: str) -> None:
        self._group.abort(reason)


def reduce(context: RankContext, bucket_bytes: int) -> tuple[Any, ...]:
    _, group = connect(make_mesh(pp=1, dp=context.num_ranks, context=context))
    parameters, counted = parameters_of(context.rank), Counted(group)
    reduction = Reduction({4: parameters}, counted, bucket_bytes=bucket_bytes)
    assert not reduction.finish(4)
    reduction.start(4)
    assert reduction.stages == [4]
    assert all(parameter.grad is None for parameter in parameters)
    assert reduction.finish(4)
    assert reduction.stages == []
    return [parameter.grad for parameter in parameters], counted.num_elements


@pytest.mark.parametrize(
    ("bucket_bytes", "num_elements"),
    [
        (2**20, [6 + 5 + 4 + 3, 1 + 1, 4 + 1]),
        (48, [6 + 1, 5 + 1, 4 + 1, 1 + 1, 4 + 1]),
        (88, [6 + 5 + 2, 4 + 1, 1 + 1, 4 + 1]),
        (1, [6 + 1, 5 + 1, 4 + 1, 1 + 1, 4 + 1]),
    ],
)
def test_buckets_hold_the_gradients_of_one_type_and_how_many_have_one(
    bucket_bytes: int, num_elements: list[int]
) -> None:
    for gradients, elements in launch_on("threads", reduce, 3, (bucket_bytes,)):
        assert elements == num_elements
        for index, factor in enumerate((6, 60, 100, 6000)):
            assert torch.equal(gradients[index], torch.full(SHAPES[index], factor, dtype=DTYPES[index]))
        assert gradients[4] is None


def reduce_sparse(context: RankContext) -> None:
    _, group = connect(make_mesh(pp=1, dp=context.num_ranks, context=context))
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    Reduction({0: embedding.parameters()}, group).start(0)


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match="must be dense.*sparse=False"):
        launch_on("threads", reduce_sparse, 2)
