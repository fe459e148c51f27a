"""Deferral: the weight gradients of linear operations, put off from the input gradient to a later moment.

Under split backward a stage runs inside a ``Deferring`` context. It puts in the place of each linear operation on
a parameter one whose backward computes only the input gradient, and notes the operation's input and output
gradient; ``Deferred.finish`` makes the weight gradients of them. Nothing else of the graph outlives the input
gradient, and no forward runs twice. Whatever is no plain linear operation gets its weight gradient at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_LINEAR: Final = torch._C._nn.linear
_ADDMM: Final = torch.addmm


@dataclass(slots=True)
class _Linear:
    """One linear operation between its input gradient and its weight gradient."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    x: Tensor
    dy: Tensor
    transposed: bool

    def finish(self) -> None:
        """weight.grad += dw; bias.grad += db."""
        dy, x = self.dy.reshape(-1, self.dy.shape[-1]), self.x.reshape(-1, self.x.shape[-1])
        left, right = (x.t(), dy) if self.transposed else (dy.t(), x)
        if self.weight.requires_grad:
            if self.weight.grad is None:
                self.weight.grad = (left @ right).to(self.weight.dtype)
            elif self.weight.grad.dtype == left.dtype:
                self.weight.grad.addmm_(left, right)
            else:
                self.weight.grad += left @ right
        if self.bias is not None and self.bias.requires_grad:
            db = dy.sum(0).to(self.bias.dtype)
            self.bias.grad = db if self.bias.grad is None else self.bias.grad.add_(db)


class Deferred:
    """The operations of one microbatch on one stage whose weight gradient is still to come.

    It is entered while the stage's own backward runs; a gradient that user code takes at another time, inside a
    forward say, is computed whole.
    """

    def __init__(self) -> None:
        self.collecting = False
        self._operations: list[_Linear] = []

    def add(self, operation: _Linear) -> None:
        """Put off one operation."""
        self._operations.append(operation)

    def __enter__(self) -> "Deferred":
        self.collecting = True
        return self

    def __exit__(self, *_: object) -> None:
        self.collecting = False

    def finish(self) -> None:
        """Make all weight gradients, in the order in which backward reached them."""
        for operation in self._operations:
            operation.finish()
        self._operations.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes that are held for what is still to come; a tensor that two operations share counts once."""
        held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in self._tensors()}
        return sum(held.values())

    def _tensors(self) -> list[Tensor]:
        return [tensor for operation in self._operations for tensor in (operation.x, operation.dy)]


class Deferring(TorchFunctionMode):
    """Context in which linear operations on parameters put off their weight gradient.

    Args:
        deferred: where they are noted.
    """

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _LINEAR:
            x, weight, bias = _linear_arguments(*args, **kwargs)
            if _can_defer(weight, bias):
                return _DeferredLinear.apply(x, weight, bias, False, self._deferred)  # type: ignore[no-untyped-call]
        elif func is _ADDMM and not kwargs and len(args) == 3:  # x @ w + b with the weight untransposed
            bias, x, weight = args
            if _can_defer(weight, bias) and bias.ndim == 1:
                return _DeferredLinear.apply(x, weight, bias, True, self._deferred)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


def _linear_arguments(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    return input, weight, bias


def _can_defer(weight: Any, bias: Any) -> bool:
    """Whether these are plain parameters on which nobody waits to hear of a gradient."""
    return (
        torch.is_grad_enabled()
        and _is_plain(weight)
        and weight.ndim == 2
        and (bias is None or _is_plain(bias))
        and (weight.requires_grad or (bias is not None and bias.requires_grad))
    )


def _is_plain(weight: Any) -> bool:
    return (
        type(weight) is nn.Parameter
        and not weight._backward_hooks
        and not getattr(weight, "_post_accumulate_grad_hooks", None)
    )


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, transposed: bool, deferred: Deferred
    ) -> Tensor:
        device = x.device.type
        saved = x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
        ctx.deferred, ctx.transposed, ctx.dtype = deferred, transposed, x.dtype
        ctx.save_for_backward(saved, weight, bias)
        if transposed:
            assert bias is not None
            return torch.addmm(bias, x, weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, bias = ctx.saved_tensors
        kernel = weight.to(dy.dtype)
        dx = (dy @ (kernel.t() if ctx.transposed else kernel)).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        deferred: Deferred = ctx.deferred
        if deferred.collecting and not torch.is_grad_enabled():
            deferred.add(_Linear(weight, bias, x, dy, ctx.transposed))
            return dx, None, None, None, None
        rows_of_dy, rows_of_x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dw = db = None
        if ctx.needs_input_grad[1]:
            dw = (rows_of_x.t() @ rows_of_dy if ctx.transposed else rows_of_dy.t() @ rows_of_x).to(weight.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            db = rows_of_dy.sum(0).to(bias.dtype)
        return dx, dw, db, None, None
