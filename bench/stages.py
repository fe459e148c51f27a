"""Stages that take a known time: asleep, without any processor, or at work."""

import time
from typing import Any

import torch
from torch import Tensor, nn


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
        output: Tensor = _Sleep.apply(self.linear(x), *self.seconds)  # type: ignore[no-untyped-call]
        return output


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


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        time.sleep(forward_seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return dy, None, None
