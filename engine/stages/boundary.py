"""Boundary: where a stage's autograd graph begins."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Boundary:
    """The tensors that a stage received, and the gradients that its backward finds for them.

    The stage gets ordinary non-leaf tensors that share storage and version counter with what was received. So its
    first operation may work in place, as in one process; and where that would spoil what the stage before it on the
    same rank still needs, autograd says so, as in one process.

    Args:
        received: the tensors that a gradient goes back for.
        anchor: any tensor that requires a gradient; it gets none.
    """

    def __init__(self, received: Sequence[Tensor], anchor: Tensor) -> None:
        self._received: Sequence[Tensor] = received
        self._anchor = anchor
        self.gradients: Sequence[Tensor | None] = [None] * len(received)

    def enter(self) -> tuple[Tensor, ...]:
        """The tensors for the stage to compute with."""
        if not self._received:
            return ()
        # Autograd follows a function only if an input wants a gradient, hence the anchor.
        tensors: tuple[Tensor, ...] = _Enter.apply(self._anchor, self)  # type: ignore[no-untyped-call]
        self._received = ()
        return tensors

    def alias(self) -> tuple[Tensor, ...]:
        """The received tensors under the same storage and version counter."""
        return tuple(tensor.detach() for tensor in self._received)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, boundary: Boundary) -> tuple[Tensor, ...]:
        ctx.boundary = boundary
        ctx.set_materialize_grads(False)
        return boundary.alias()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        ctx.boundary.gradients = gradients
        return None, None
