"""Loss: the batch's mean from the losses of its microbatches."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from stagewright.engine.agreement import Agreement
from stagewright.engine.batch import num_rows, tensors_of
from stagewright.engine.value import Value

# (output, target) -> the mean over the microbatch's rows, or (sum, count); either may have a dict of metrics behind it
LossFunction: TypeAlias = Callable[[Value, Value], Any]

_LOW_PRECISION: Final = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Means:
    """Means over a batch, or over the part of it that one rank has seen.

    Args:
        values: the loss and the metrics by name, each multiplied by its weight.
        weight: what to divide by: 1 for the whole batch, or the count of a loss that comes as (sum, count).
        counts: whether it comes so.
    """

    values: Mapping[str, Tensor]
    weight: float
    counts: bool

    def mean(self, name: str) -> Tensor | None:
        """The mean of the loss, named "loss", or of a metric; 0 over nothing."""
        value = self.values.get(name)
        if value is None or not self.counts:
            return value
        return value / self.weight if self.weight else torch.zeros_like(value)


def together(own: Means, agreement: Agreement, sources: Sequence[int], readers: Sequence[int]) -> Means:
    """The means of the whole batch, from the parts that some ranks have seen; every rank calls this alike.

    Args:
        own: what this rank has seen.
        agreement: connects the ranks.
        sources, readers: the ranks that have seen a part, and those that get to know the whole; others get nothing.
    """
    numbers = {name: value.item() for name, value in own.values.items()} if agreement.rank in sources else {}
    data = json.dumps([numbers, own.weight, own.counts]).encode()
    parts = [part for data in agreement.spread(data, sources, readers) if (part := json.loads(data))[0]]
    names = dict.fromkeys(name for numbers, _, _ in parts for name in numbers)
    sums = {name: sum(numbers.get(name, 0.0) for numbers, _, _ in parts) for name in names}
    values = {name: torch.tensor(total, dtype=torch.float64) for name, total in sums.items()}
    counts = any(counts for _, _, counts in parts)
    return Means(values, sum(weight for _, weight, _ in parts) if counts else 1.0, counts)


class BatchLoss:
    """The loss of one batch, gathered microbatch by microbatch on the rank of the last stage.

    Each microbatch's mean counts with its share of the batch's rows, so the result, and with it the gradient,
    is that of the whole batch, also where the rows do not divide evenly. A loss that comes as (sum, count) is
    divided by the count of the whole batch. Metrics are averaged in the same way: by rows, or by counts.

    Args:
        function: (output, target) -> mean over the microbatch's rows; or (sum, count), such as of tokens; or one of
            these with a dict of metrics behind it.
        targets: one a microbatch, or None each for a loss without targets.
        inputs: one a microbatch; they tell the rows where there are no targets, and are not needed where the rows
            divide evenly.
        per_update: microbatches whose gradients go into one update; all of the batch where left out.
        allows_counts: whether a (sum, count) can be divided: an asynchronous schedule must know of it beforehand.
    """

    def __init__(
        self,
        function: LossFunction,
        targets: Sequence[Value],
        inputs: Sequence[Value],
        *,
        per_update: int | None = None,
        allows_counts: bool = True,
    ) -> None:
        self._function = function
        self._allows_counts = allows_counts
        self._targets = targets
        counted = targets if targets[0] is not None else inputs
        self._knows_rows = counted[0] is not None
        rows = [num_rows(value, "the target") if self._knows_rows else 1 for value in counted]
        self._shares = [count / sum(rows) for count in rows]
        size = per_update or len(rows)
        updates = [rows[start : start + size] for start in range(0, len(rows), size)]
        self._gradients = [count / sum(update) for update in updates for count in update]
        self._num_rows: int | None = None
        self._values: dict[str, Tensor] = {}
        self._counts: list[Tensor | float] = []  # tensors as they come: to ask a GPU for a number is to wait for it
        self._is_mean = False

    def of(self, microbatch: int, output: Value) -> tuple[Tensor, float]:
        """The loss of one microbatch with its graph, and the gradient to start its backward with.

        A (sum, count) starts with 1: what to divide by is known when all microbatches are through.
        """
        loss, count, metrics = _parts(self._function(output, self._targets[microbatch]))
        self._check_kind(count)
        if count is None:
            if not self._knows_rows:
                self._check_even(output)
            weight: Tensor | float = self._shares[microbatch]
            self._add("loss", loss.detach() * weight)
        else:
            weight = count.detach().reshape(()) if isinstance(count, Tensor) else count
            self._counts.append(weight)
            self._add("loss", loss.detach())
        for name, metric in metrics.items():
            self._add(name, _weighted(metric, weight))
        return loss, self._gradients[microbatch] if count is None else 1.0

    def means(self) -> Means:
        """What this rank has seen; no values where it has computed no loss."""
        return Means(self._values, sum(map(float, self._counts)) if self._counts else 1.0, bool(self._counts))

    def _add(self, name: str, value: Tensor) -> None:
        value = value.reshape(())
        value = value.float() if value.dtype in _LOW_PRECISION else value
        self._values[name] = self._values[name] + value if name in self._values else value

    def _check_kind(self, count: Tensor | float | None) -> None:
        if count is not None and not self._allows_counts:
            raise TypeError(
                "loss_fn returned (sum, count): an asynchronous schedule must know beforehand that it does; give the "
                "Pipeline loss_counts=True"
            )
        if self._is_mean if count is not None else bool(self._counts):
            raise TypeError("loss_fn returns either a mean or (sum, count), the same for all microbatches: got both")
        self._is_mean = count is None

    def _check_even(self, output: Value) -> None:
        """Without targets and inputs every microbatch counts alike, which is right only if all have as many rows."""
        rows = next((tensor.shape[0] for tensor in tensors_of(output) if tensor.ndim), None)
        self._num_rows = self._num_rows or rows
        if rows != self._num_rows:
            raise ValueError(
                f"microbatches of {self._num_rows} and {rows} rows do not count alike in the mean of the batch, and "
                "there is no target to tell how many there are: give x on the rank of the last stage, too"
            )


def _parts(result: Any) -> tuple[Tensor, Tensor | float | None, Mapping[str, Any]]:
    """What a loss function returned: the loss, the count if there is one, the metrics.

    Raises:
        TypeError: it returned something else.
    """
    match result:
        case Tensor():
            parts: tuple[Any, Any, Any] = result, None, {}
        case (loss, Mapping() as metrics):
            parts = loss, None, metrics
        case (loss, count, Mapping() as metrics):
            parts = loss, count, metrics
        case (loss, count):
            parts = loss, count, {}
        case _:
            raise TypeError(
                f"loss_fn returns the mean over its microbatch's rows, or (sum, count): got {_kind(result)}"
            )
    loss, count, metrics = parts
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(f"loss_fn returns one number, the mean over the rows of its microbatch: got {_kind(loss)}")
    if count is not None and not (isinstance(count, int | float) or (isinstance(count, Tensor) and count.numel() == 1)):
        raise TypeError(f"the count of a (sum, count) loss is one number: got {_kind(count)}")
    for name, metric in metrics.items():
        if not isinstance(metric, int | float) and not (isinstance(metric, Tensor) and metric.numel() == 1):
            raise TypeError(f"a metric is one number: got {_kind(metric)} for {name!r}")
    return parts


def _weighted(metric: Tensor | float, weight: Tensor | float) -> Tensor:
    """A metric as often as it counts; a mean over nothing may be anything, also no number, and counts 0."""
    if not isinstance(metric, Tensor):
        metric = torch.tensor(metric, dtype=torch.float64)
    weighted = metric.detach() * weight
    if isinstance(weight, Tensor):
        return torch.where(weight.to(metric.device) == 0, 0.0, weighted)
    return weighted if weight else torch.zeros_like(weighted)


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
