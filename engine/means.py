"""Means: the loss and the metrics of a batch, over the part that one rank has seen, and over all parts."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stagewright.engine.transport.group import Group, gather_bytes
from stagewright.engine.updates.agreement import Agreement


@dataclass(frozen=True)
class Sum:
    """A weighted sum over microbatches, and the sum of their weights."""

    value: Tensor
    weight: float

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.value + other.value, self.weight + other.weight)

    @property
    def mean(self) -> Tensor:
        """The weighted mean; 0 over nothing."""
        if math.isclose(self.weight, 1.0, rel_tol=1e-12):  # shares of a batch, all of them
            return self.value
        return self.value / self.weight if self.weight else torch.zeros_like(self.value)


@dataclass(frozen=True)
class Means:
    """Means over a batch, or over the part of it that one rank has seen.

    Args:
        loss: of the microbatches seen, weighted by their shares of the batch, or a sum with its count; None where none
            was seen.
        counts: whether it comes as (sum, count).
        metrics: by name, over the microbatches that gave them.
    """

    loss: Sum | None
    counts: bool
    metrics: Mapping[str, Sum]

    @property
    def weight(self) -> float:
        """What to divide gradients by: 1 for the whole batch, or the count of a loss that comes as (sum, count)."""
        return self.loss.weight if self.loss is not None and self.counts else 1.0


def together(own: Means, agreement: Agreement, sources: Sequence[int], readers: Sequence[int]) -> Means:
    """The means of the whole batch, from the parts that some ranks have seen; every rank calls this alike.

    Args:
        own: what this rank has seen.
        agreement: connects the ranks.
        sources, readers: the ranks that have seen a part, and those that get to know the whole; others get nothing.
    """
    if len(readers) == 1:
        return own
    data = _written(own) if agreement.rank in sources else b""
    return _added(agreement.spread(data, sources, readers))


def of_all_replicas(own: Means, group: Group, rank: int, sources: Sequence[int]) -> Means:
    """The means over what all replicas have seen.

    Args:
        own: what this rank has seen.
        group: the same rank of all replicas.
        rank: this one.
        sources: the ranks that have seen a part; on others there is nothing to add.
    """
    if group.size == 1 or rank not in sources:
        return own
    return _added(gather_bytes(group, _written(own)))


def _written(means: Means) -> bytes:
    if means.loss is None:
        return b"null"
    metrics = [[name, metric.value.item(), metric.weight] for name, metric in means.metrics.items()]
    return json.dumps([means.loss.value.item(), means.loss.weight, means.counts, metrics]).encode()


def _added(of_ranks: Sequence[bytes]) -> Means:
    """The means over several parts of a batch."""
    loss, counts, metrics = None, False, dict[str, Sum]()
    for data in of_ranks:
        if (seen := json.loads(data)) is not None:
            value, weight, counts, of_rank = seen
            loss = _plus(loss, _sum(value, weight))
            for name, value, weight in of_rank:
                metrics[name] = _plus(metrics.get(name), _sum(value, weight))
    return Means(loss, counts, metrics)


def _sum(value: float, weight: float) -> Sum:
    return Sum(torch.tensor(value, dtype=torch.float64), weight)


def _plus(one: Sum | None, other: Sum) -> Sum:
    return other if one is None else one + other
