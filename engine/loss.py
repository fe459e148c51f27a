"""Loss: the batch's mean from the losses of its microbatches."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from stagewright.engine.batch import num_rows, tensors_of
from stagewright.engine.means import Means, Sum
from stagewright.engine.transport.group import Alone, Group, start_numbers
from stagewright.engine.value import Value

logger = logging.getLogger(__name__)

# (output, target) -> the mean over the microbatch's rows, or (sum, count); either may have a dict of metrics behind it
LossFunction: TypeAlias = Callable[[Value, Value], Any]

_LOW_PRECISION: Final = (torch.float16, torch.bfloat16)


class BatchLoss:
    """The loss of one batch, gathered microbatch by microbatch on the rank of the last stage.

    Each microbatch's mean counts with its share of the batch's rows, so the result, and with it the gradient,
    is that of the whole batch, also where the rows do not divide evenly. A loss that comes as (sum, count) is
    divided by the count of the whole batch. Metrics are averaged in the same way: by rows, or by counts. The rows are
    those of all replicas; these tell each other how many they have while the first microbatch is on its way here.

    Args:
        function: (output, target) -> mean over the microbatch's rows; or (sum, count), such as of tokens; or one of
            these with a dict of metrics behind it.
        targets: one a microbatch, or None each for a loss without targets.
        inputs: one a microbatch; they tell the rows where there are no targets, and are not needed where the rows
            divide evenly.
        per_update: microbatches whose gradients go into one update; all of the batch where left out.
        allows_counts: whether a (sum, count) can be divided: an asynchronous schedule must know of it beforehand.
        group: the same rank of all replicas; none where left out.
    """

    def __init__(
        self,
        function: LossFunction,
        targets: Sequence[Value],
        inputs: Sequence[Value],
        *,
        per_update: int | None = None,
        allows_counts: bool = True,
        group: Group | None = None,
    ) -> None:
        self._group = group or Alone()
        self._function = function
        self._allows_counts = allows_counts
        self._targets = targets
        counted = targets if targets[0] is not None else inputs
        self._knows_rows = counted[0] is not None
        self._rows = [num_rows(value, "the target") if self._knows_rows else 1 for value in counted]
        self._per_update = per_update or len(self._rows)
        starts = range(0, len(self._rows), self._per_update)
        of_updates = [sum(self._rows[start : start + self._per_update]) for start in starts]
        self._sum = start_numbers(self._group, [*of_updates, self._knows_rows])
        self._shares: list[float] = []  # of each microbatch, in the batch's mean
        self._gradients: list[float] = []  # the same in the mean of those that go into one update
        self._num_rows: int | None = None
        self._metrics: dict[str, tuple[Tensor, list[Tensor | float]]] = {}
        self._weights: list[float] = []
        self._counts: list[Tensor | float] = []  # tensors as they come: to ask a GPU for a number is to wait for it
        # Each microbatch with what its loss adds to the total. That is added up when somebody asks: the backward waits.
        self._seen: list[tuple[int, Tensor]] = []
        self._is_mean = False
        self._wants_gradient = self._has_gradient = False

    def await_rows(self) -> None:
        """Wait until it is known how many rows there are in all replicas.

        Raises:
            ValueError: some replicas know how many they have, and others do not.
        """
        if self._shares:
            return
        *of_updates, num_knowing = self._sum.wait().tolist()
        if num_knowing not in (0, self._group.size):
            raise ValueError(
                f"microbatches count by their rows, and {self._group.size - int(num_knowing)} of {self._group.size} "
                "replicas do not know theirs: give y, or x on the rank of the last stage, in all of them"
            )
        self._shares = [rows / sum(of_updates) for rows in self._rows]
        self._gradients = [
            rows / of_updates[microbatch // self._per_update] for microbatch, rows in enumerate(self._rows)
        ]

    def of(self, microbatch: int, output: Value) -> tuple[Tensor, float]:
        """The loss of one microbatch with its graph, and the gradient to start its backward with.

        A (sum, count) starts with 1: what to divide by is known when all microbatches are through.
        """
        self.await_rows()
        loss, count, metrics = _parts(self._function(output, self._targets[microbatch]))
        self._wants_gradient |= any(tensor.requires_grad for tensor in tensors_of(output))
        self._has_gradient |= loss.requires_grad
        self._check_kind(count)
        if count is None:
            if not self._knows_rows:
                self._check_even(output)
            weight: Tensor | float = self._shares[microbatch]
            self._weights.append(self._shares[microbatch])
            self._seen.append((microbatch, loss.detach() * self._shares[microbatch]))
        else:
            weight = count.detach().reshape(()) if isinstance(count, Tensor) else count
            self._counts.append(weight)
            self._seen.append((microbatch, loss.detach().clone()))
        for name, metric in metrics.items():
            value, weights = self._metrics.get(name, (None, []))
            self._metrics[name] = (_added_to(value, _weighted(metric, weight)), [*weights, weight])
        return loss, self._gradients[microbatch] if count is None else 1.0

    def means(self) -> Means:
        """What this rank has seen; no loss where it has computed none."""
        weights = self._counts or self._weights
        loss = Sum(self._total(), sum(map(float, weights))) if self._seen else None
        metrics = {name: Sum(value, sum(map(float, of))) for name, (value, of) in self._metrics.items()}
        return Means(loss, bool(self._counts), metrics)

    def _total(self) -> Tensor:
        total: Tensor | None = None
        for _, loss in self._seen:
            total = _added_to(total, loss)
        assert total is not None, "some were seen"
        return total

    def first_fault(self) -> int | None:
        """The first microbatch seen here whose loss is NaN or infinite; None where there is none."""
        if not self._seen:
            return None
        finite = torch.stack([torch.isfinite(loss).reshape(()) for _, loss in self._seen]).tolist()
        faults = [microbatch for (microbatch, _), is_finite in zip(self._seen, finite) if not is_finite]
        return min(faults, default=None)

    def warn_if_detached(self, step: int) -> None:
        """Say so where outputs have a graph and no loss has: a microbatch may lack one, but hardly a whole batch."""
        if self._wants_gradient and not self._has_gradient:
            logger.warning(
                "step %d trains nothing: no loss depends on the output of the model; does loss_fn detach it?", step
            )

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


def _added_to(total: Tensor | None, value: Tensor) -> Tensor:
    value = value.reshape(())
    value = value.float() if value.dtype in _LOW_PRECISION else value
    return value if total is None else total + value


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
