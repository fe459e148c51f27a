"""Stages that take a known time: asleep, without any processor, or at work."""

import os
import time
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from stagewright.engine.stages.deferral import Deferring, _DeferredOperation
from stagewright.engine.stages.operations import Linear

# Between waking up and the end of what a stage takes.
AWAKE_SECONDS: Final = 0.0006


def stay_on_one_processor(rank: int) -> None:
    """Keep a rank where its caches are, as those who launch ranks on large machines do; the ranks share what there is.

    A rank that sleeps may otherwise wake up anywhere, and whatever it does next takes some times as long there.
    """
    if hasattr(os, "sched_setaffinity"):  # not every system has it
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[rank % len(processors)]})


class SleepStage(nn.Module):
    """A small linear map that sleeps for what is left of the time that it is to take, forward and back.

    Args:
        forward_seconds, backward_seconds: how long F and B take.
        width: of what crosses, [rows, width].
    """

    def __init__(self, forward_seconds: float, backward_seconds: float, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seconds = (forward_seconds, backward_seconds)
        self.anchor = torch.zeros(0, requires_grad=True)  # so that also the backward of a first stage ends with Begin

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, and let the backward sleep."""
        forward_seconds, backward_seconds = self.seconds
        clock = Clock()
        x = Begin.apply(x, self.anchor, clock, backward_seconds)  # type: ignore[no-untyped-call]
        output: Tensor = End.apply(self.linear(x), clock, forward_seconds)  # type: ignore[no-untyped-call]
        return output


class HalvedSleepStage(nn.Module):
    """The same with a backward of two halves: under split backward each sleeps when it is due.

    Args:
        forward_seconds, input_seconds, weight_seconds: how long F, I and W take; B both of the latter.
        width: of what crosses, [rows, width].
    """

    def __init__(self, forward_seconds: float, input_seconds: float, weight_seconds: float, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seconds = (forward_seconds, input_seconds)
        self.operation = _SleepingLinear(seconds=weight_seconds)
        self.anchor = torch.zeros(0, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, and let both halves of the backward sleep."""
        clock, linear = Clock(), self.linear
        forward_seconds, backward_seconds = self.seconds
        modes = [mode for mode in _modes() if isinstance(mode, Deferring)]
        if not modes:
            backward_seconds += self.operation.seconds
        x = Begin.apply(x, self.anchor, clock, backward_seconds)  # type: ignore[no-untyped-call]
        if modes:
            # As the mode itself does with a linear map; in the place of that its operation is one that sleeps.
            arguments = (self.operation, x, linear.weight, linear.bias, modes[-1]._deferred)
            x = _DeferredOperation.apply(*arguments)  # type: ignore[no-untyped-call]
        else:
            x = linear(x)
        output: Tensor = End.apply(x, clock, forward_seconds)  # type: ignore[no-untyped-call]
        return output


def _modes() -> list[Any]:
    """The contexts that see torch's functions now, the innermost last."""
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes


class Clock:
    """When the forward or the backward of one microbatch began."""

    _MATRIX: Final = torch.eye(8)

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """It begins now."""
        self._start = time.perf_counter()

    def rest(self, seconds: float) -> None:
        """Sleep until so much time has gone by since the beginning, and compute for the very last of it.

        A system wakes nobody on time; and a processor that has slept is slow at first, as none is that has computed.
        With fewer processors than ranks another one may wait for this one: it goes first.
        """
        end = self._start + seconds
        time.sleep(max(end - AWAKE_SECONDS - time.perf_counter(), 0.0))
        with torch._C.DisableTorchFunction():
            while time.perf_counter() < end:
                torch.mm(self._MATRIX, self._MATRIX)
                os.sched_yield()


@dataclass(frozen=True, slots=True)
class _SleepingLinear(Linear):
    """A linear map whose weight gradient, with that of its bias, takes its time."""

    seconds: float = 0.0
    clock: Clock = field(default_factory=Clock, compare=False)

    def weight_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """dw."""
        self.clock.restart()
        return Linear.weight_gradient(self, dy, x, weight)

    def add_weight_gradient(self, total: Tensor, dy: Tensor, x: Tensor, weight: Tensor) -> None:
        """total += dw."""
        self.clock.restart()
        Linear.add_weight_gradient(self, total, dy, x, weight)

    def bias_gradient(self, dy: Tensor) -> Tensor:
        """db, which comes last of all."""
        gradient = Linear.bias_gradient(self, dy)
        self.clock.rest(self.seconds)
        return gradient


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


class Begin(torch.autograd.Function):
    """Where a stage's forward begins and its backward ends: there it sleeps, and changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.rest(ctx.seconds)
        return dy, None, None, None


class End(torch.autograd.Function):
    """Where a stage's forward ends, having slept, and its backward begins."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock = clock
        output = y.clone()
        clock.rest(seconds)
        return output

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.restart()
        return dy, None, None
