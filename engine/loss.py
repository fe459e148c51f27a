"""Loss: the batch's mean from the losses of its microbatches."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from stagewright.engine.batch import num_rows, tensors_of
from stagewright.engine.value import Value

LossFunction: TypeAlias = Callable[[Value, Value], Tensor]


class BatchLoss:
    """The loss of one batch, gathered microbatch by microbatch on the rank of the last stage.

    Each microbatch's mean counts with its share of the batch's rows, so the result, and with it the gradient,
    is that of the whole batch, also where the rows do not divide evenly.

    Args:
        function: (output, target) -> mean over the microbatch's rows.
        targets: one a microbatch, or None each for a loss without targets.
        inputs: one a microbatch; they tell the rows where there are no targets, and are not needed where the rows
            divide evenly.
    """

    def __init__(self, function: LossFunction, targets: Sequence[Value], inputs: Sequence[Value]) -> None:
        self._function = function
        self._targets = targets
        counted = targets if targets[0] is not None else inputs
        self._knows_rows = counted[0] is not None
        rows = [num_rows(value, "the target") if self._knows_rows else 1 for value in counted]
        self.shares = [count / sum(rows) for count in rows]
        self._losses: list[Tensor] = []
        self._num_rows: int | None = None

    def of(self, microbatch: int, output: Value) -> Tensor:
        """The loss of one microbatch, with its graph."""
        loss = self._function(output, self._targets[microbatch])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"loss_fn returns one number, the mean over the rows of its microbatch: got {got}")
        if not self._knows_rows:
            self._check_even(output)
        self._losses.append(loss.detach() * self.shares[microbatch])
        return loss

    def total(self) -> Tensor | None:
        """The batch's loss, or None where this rank has computed none of it."""
        return torch.stack([loss.reshape(()) for loss in self._losses]).sum() if self._losses else None

    def _check_even(self, output: Value) -> None:
        """Without targets and inputs every microbatch counts alike, which is right only if all have as many rows."""
        rows = next((tensor.shape[0] for tensor in tensors_of(output) if tensor.ndim), None)
        self._num_rows = self._num_rows or rows
        if rows != self._num_rows:
            raise ValueError(
                f"microbatches of {self._num_rows} and {rows} rows do not count alike in the mean of the batch, and "
                "there is no target to tell how many there are: give x on the rank of the last stage, too"
            )
