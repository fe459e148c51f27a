"""Deferral: the weight gradients of a stage's operations, put off from the input gradient to a later moment.

Under split backward a stage runs inside a ``Deferring`` context. It puts in the place of each operation of the table
in ``operations`` one whose backward computes only the input gradient, and notes the operation's input and output
gradient; ``Deferred.finish`` makes the weight gradients of them. Nothing else of the graph outlives the input
gradient, and no forward runs twice. What is in no table, or has hooks on its weight, gets its weight gradient at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from stagewright.engine.stages.operations import OPERATIONS, Operation


@dataclass(slots=True)
class _Pending:
    """One operation between its input gradient and its weight gradient."""

    operation: Operation
    weight: nn.Parameter
    bias: nn.Parameter | None
    x: Tensor
    dy: Tensor

    def finish(self) -> None:
        """weight.grad += dw; bias.grad += db."""
        weight, bias = self.weight, self.bias
        if weight.requires_grad:
            if weight.grad is None:
                weight.grad = self.operation.weight_gradient(self.dy, self.x, weight).to(weight.dtype)
            else:
                self.operation.add_weight_gradient(weight.grad, self.dy, self.x, weight)
        if bias is not None and bias.requires_grad:
            db = self.operation.bias_gradient(self.dy).to(bias.dtype)
            bias.grad = db if bias.grad is None else bias.grad.add_(db)


class Deferred:
    """The operations of one microbatch on one stage whose weight gradient is still to come.

    It is entered while the stage's own backward runs; a gradient that user code takes at another time, inside a
    forward say, is computed whole.
    """

    def __init__(self) -> None:
        self._collecting = False
        self._pending: list[_Pending] = []

    def add(self, operation: Operation, weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, dy: Tensor) -> None:
        """Put off one operation; of x only the numbers are kept, not the graph that it came from."""
        self._pending.append(_Pending(operation, weight, bias, x.detach(), dy))

    def takes(self, accumulator: Any) -> bool:
        """Whether the gradient that is being computed goes where ``accumulator`` adds up a parameter's gradient.

        It does in the stage's own backward, and not where that runs user code which asks ``torch.autograd.grad``.
        """
        if not self._collecting or torch.is_grad_enabled():
            return False
        try:
            return torch._C._will_engine_execute_node(accumulator)
        except RuntimeError:  # torch.autograd.grad wants the gradient of this very parameter
            return False

    def __enter__(self) -> "Deferred":
        self._collecting = True
        return self

    def __exit__(self, *_: object) -> None:
        self._collecting = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While a forward is computed again inside the backward: gradients that it takes are its own affair."""
        before, self._collecting = self._collecting, False
        try:
            yield
        finally:
            self._collecting = before

    @torch.no_grad()
    def finish(self) -> None:
        """Make all weight gradients, in the order in which backward reached them."""
        for pending in self._pending:
            pending.finish()
        self._pending.clear()

    @property
    def tensors(self) -> list[Tensor]:
        """What is held for the gradients that are still to come."""
        return [tensor for pending in self._pending for tensor in (pending.x, pending.dy)]


class Deferring(TorchFunctionMode):
    """Context in which operations on parameters put off their weight gradient.

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
        read = OPERATIONS.get(func)
        if read is not None and "out" not in kwargs:
            call = read(*args, **kwargs)
            if call is not None and _can_defer(*call[1:]):
                return _DeferredOperation.apply(*call, self._deferred)  # type: ignore[no-untyped-call]
        inside = _TRANSPARENT.get(func)
        if inside is None:
            return func(*args, **kwargs)
        with self:
            return inside(*args, **kwargs)


def _can_defer(x: Any, weight: Any, bias: Any) -> bool:
    """Whether these are plain parameters on which nobody waits to hear of a gradient."""
    return (
        torch.is_grad_enabled()
        and _is_plain(weight)
        and (bias is None or _is_plain(bias))
        and (weight.requires_grad or (bias is not None and bias.requires_grad))
        and type(x) in (Tensor, nn.Parameter)
        # vmap and the like, and forward mode, differentiate by themselves
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )


def _is_plain(weight: Any) -> bool:
    return (
        type(weight) is nn.Parameter
        and weight.dtype.is_floating_point  # not complex: the table knows no conjugates
        and not weight._backward_hooks
        and not getattr(weight, "_post_accumulate_grad_hooks", None)
    )


class _DeferredOperation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, operation: Operation, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, deferred: Deferred
    ) -> Tensor:
        y = operation.forward(x, weight, bias)
        # Autocast computes, and keeps for its backward, in another type than that of x.
        saved = x.to(y.dtype) if x.is_floating_point() and x.dtype != y.dtype else x
        ctx.operation, ctx.deferred, ctx.dtype = operation, deferred, x.dtype
        # The parameters themselves are kept beside what is saved: a checkpoint gives copies back, without their .grad.
        ctx.parameters = weight, bias
        ctx.save_for_backward(saved, weight)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None, None]:
        x, kernel = ctx.saved_tensors  # a checkpoint runs its forward again here, for which the mode must be on
        with torch._C.DisableTorchFunction():
            return None, *_gradients(ctx, dy, x, kernel), None


def _gradients(ctx: Any, dy: Tensor, x: Tensor, kernel: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dw, db; the latter two only if they cannot wait."""
    operation: Operation = ctx.operation
    weight, bias = ctx.parameters
    if kernel.dtype != dy.dtype:
        kernel = kernel.to(dy.dtype)
    _, wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
    dx = operation.input_gradient(dy, x, kernel).to(ctx.dtype) if wants_x else None
    # Behind x, weight and bias, where they want a gradient: the last of the three adds up that of a parameter.
    accumulator = next(node for node, _ in reversed(ctx.next_functions) if node is not None)
    if ctx.deferred.takes(accumulator):
        ctx.deferred.add(operation, weight, bias, x, dy)
        return dx, None, None
    dw = operation.weight_gradient(dy, x, kernel).to(weight.dtype) if wants_weight else None
    db = operation.bias_gradient(dy).to(bias.dtype) if wants_bias else None
    return dx, dw, db


def _never(*_: object) -> bool:
    return False


_GUARDS: Final = {"has_torch_function": _never, "has_torch_function_unary": _never}


def _without_guard(function: Any) -> Callable[..., Any]:
    """The same function for calls inside a mode.

    What torch has written in Python asks first whether there is a mode, and hands itself to it whole; so the mode would
    not see what happens inside. This copy never asks.
    """
    inside = FunctionType(function.__code__, {**function.__globals__, **_GUARDS}, function.__name__)
    inside.__defaults__, inside.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return inside


# Inside these run linears, or forwards that a checkpoint repeats: there the mode must be on as it was the first time.
_TRANSPARENT: Final[Mapping[Any, Callable[..., Any]]] = MappingProxyType(
    {
        function: _without_guard(function)
        for function in (
            functional.multi_head_attention_forward,
            torch.autograd.grad,
            torch.autograd.backward,
            Tensor.backward,
        )
        if _GUARDS.keys() & set(function.__code__.co_names)
    }
)
