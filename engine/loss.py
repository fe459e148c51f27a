"""Loss: the batch's mean from the losses of its microbatches."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from stagewright.engine.batch import num_rows
from stagewright.engine.value import Value

LossFunction: TypeAlias = Callable[[Value, Value], Tensor]


class BatchLoss:
    """The loss of one batch, gathered microbatch by microbatch on the rank of the last stage.

    Each microbatch's mean counts with its share of the batch's rows, so the result, and with it the gradient,
    is that of the whole batch, also where the rows do not divide evenly.

    Args:
        function: (output, target) -> mean over the microbatch's rows.
        targets: one a microbatch.
    """

    def __init__(self, function: LossFunction, targets: Sequence[Value]) -> None:
        self._function = function
        self._targets = targets
        rows = [0 if target is None else num_rows(target, "the target") for target in targets]
        total = sum(rows)
        self.shares = [count / total if total else 1 / len(rows) for count in rows]
        self._losses: list[Tensor] = []

    def of(self, microbatch: int, output: Value) -> Tensor:
        """The loss of one microbatch, with its graph."""
        loss = self._function(output, self._targets[microbatch])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"loss_fn returns one number, the mean over the rows of its microbatch: got {got}")
        self._losses.append(loss.detach() * self.shares[microbatch])
        return loss

    def total(self) -> Tensor | None:
        """The batch's loss, or None where this rank has computed none of it."""
        return torch.stack([loss.reshape(()) for loss in self._losses]).sum() if self._losses else None
