"""Stages that take a known time: asleep, without any processor, or at work."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from stagewright.engine.deferral import Deferring, _DeferredOperation
from stagewright.engine.operations import Linear


class SleepStage(nn.Module):
    """A small linear map that sleeps as it goes forward and as it comes back.

    Args:
        forward_seconds, backward_seconds: for how long.
        width: of what crosses, [rows, width].
    """

    def __init__(self, forward_seconds: float, backward_seconds: float, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seconds = (forward_seconds, backward_seconds)

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, and let the backward sleep."""
        output: Tensor = Sleep.apply(self.linear(x), *self.seconds)  # type: ignore[no-untyped-call]
        return output


class HalvedSleepStage(nn.Module):
    """The same with a backward of two halves: under split backward each sleeps when it is due.

    Args:
        forward_seconds, input_seconds, weight_seconds: for how long F, I and W sleep; B for both of the latter.
        width: of what crosses, [rows, width].
    """

    def __init__(self, forward_seconds: float, input_seconds: float, weight_seconds: float, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seconds = (forward_seconds, input_seconds)
        self.operation = _SleepingLinear(seconds=weight_seconds)

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, and let both halves of the backward sleep."""
        modes = [mode for mode in _modes() if isinstance(mode, Deferring)]
        if modes:
            # As the mode itself does with a linear map; in the place of that its operation is one that sleeps.
            linear = self.linear
            arguments = (self.operation, x, linear.weight, linear.bias, modes[-1]._deferred)
            x = _DeferredOperation.apply(*arguments)  # type: ignore[no-untyped-call]
            output: Tensor = Sleep.apply(x, *self.seconds)  # type: ignore[no-untyped-call]
        else:
            forward, backward = self.seconds
            output = Sleep.apply(self.linear(x), forward, backward + self.operation.seconds)  # type: ignore[no-untyped-call]
        return output


def _modes() -> list[Any]:
    """The contexts that see torch's functions now, the innermost last."""
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes


@dataclass(frozen=True, slots=True)
class _SleepingLinear(Linear):
    """A linear map whose weight gradient sleeps first."""

    seconds: float = 0.0

    def weight_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """dw."""
        time.sleep(self.seconds)
        return Linear.weight_gradient(self, dy, x, weight)

    def add_weight_gradient(self, total: Tensor, dy: Tensor, x: Tensor, weight: Tensor) -> None:
        """total += dw."""
        time.sleep(self.seconds)
        Linear.add_weight_gradient(self, total, dy, x, weight)


class WorkStage(nn.Module):
    """Linear maps that take a processor's time.

    Args:
        num_layers: of them.
        width: of each, and of what crosses, [rows, width].
    """

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Through all of them."""
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class Sleep(torch.autograd.Function):
    """Sleeps as it goes forward and as it comes back, and changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        time.sleep(forward_seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return dy, None, None
