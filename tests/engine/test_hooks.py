"""Hooks in user stages behave as in one process: once per microbatch, and never piled up."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from modules import Stages
from plain import make_batch, squared_error
from scenario import Scenario, assert_alike
from torch import Tensor, nn

from stagewright.engine import Pipeline
from stagewright.schedules import Schedule, create

MICROBATCHES = 4
SCHEDULES = ["interleaved", "interleaved-zb"]


class Linear(nn.Module):
    """A linear whose weight can be hooked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def schedule_of(name: str, num_chunks: int) -> Schedule:
    """All stages on one rank, under full or split backward."""
    return create(name, num_ranks=1, num_microbatches=MICROBATCHES, num_chunks=num_chunks)


class Counted:
    """A hook of any kind that counts its calls and changes nothing."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: object) -> None:
        self.calls += 1


def calls_per_step(name: str, hook: Callable[[nn.Module, Counted], object]) -> list[int]:
    """Hook the middle one of three stages on one rank, train three steps, and count the calls of each."""
    counted = Counted()
    modules = {stage: Stages(Linear)(stage) for stage in range(3)}
    hook(modules[1], counted)
    calls = []
    with Pipeline(modules, schedule=schedule_of(name, 3), loss_fn=squared_error) as pipe:
        for step in range(3):
            pipe.forward_backward(*make_batch(9, step))
            calls.append(counted.calls)
            counted.calls = 0
    return calls


HOOKS: dict[str, Callable[[nn.Module, Counted], object]] = {
    "before forward": lambda module, hook: module.register_forward_pre_hook(hook),
    "after forward": lambda module, hook: module.register_forward_hook(hook),
    "before backward": lambda module, hook: module.register_full_backward_pre_hook(hook),
    "after backward": lambda module, hook: module.register_full_backward_hook(hook),
    "after the linear's backward": lambda module, hook: module.linear.register_full_backward_hook(hook),  # type: ignore[union-attr]
    "on a weight": lambda module, hook: module.linear.weight.register_hook(hook),  # type: ignore[union-attr]
    "after a weight's accumulation": lambda module, hook: module.linear.weight.register_post_accumulate_grad_hook(hook),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_hook_runs_once_per_microbatch(name: str, kind: str) -> None:
    assert calls_per_step(name, HOOKS[kind]) == [MICROBATCHES] * 3


class HooksItsTensors(nn.Module):
    """Each forward hooks what it received and what it makes, as user code does to look at gradients."""

    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: self.calls.update(["in"]))
        y.register_hook(lambda gradient: self.calls.update(["out"]))
        return y


@pytest.mark.parametrize("name", SCHEDULES)
def test_hooks_on_what_crosses_never_pile_up(name: str) -> None:
    calls: Counter[str] = Counter()
    modules = {stage: HooksItsTensors(calls) for stage in range(2)}
    with Pipeline(modules, schedule=schedule_of(name, 2), loss_fn=squared_error) as pipe:
        for step in range(3):
            pipe.forward_backward(*make_batch(9, step))
            assert calls == {"in": MICROBATCHES, "out": 2 * MICROBATCHES}
            calls.clear()


class Doubled(nn.Module):
    """A hook on its weight doubles the gradient; one on its activation turns that one round."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.linear.weight.register_hook(lambda gradient: 2 * gradient)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.register_hook(torch.neg)
        z: Tensor = self.other(y)
        return z


@pytest.mark.parametrize("name", SCHEDULES)
def test_hooks_that_change_gradients(name: str) -> None:
    assert_alike(Scenario(Stages(Doubled)), name)


class Drained(nn.Module):
    """A hook takes each gradient away as soon as it is complete, as optimizers do that step inside the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("total", torch.zeros(6, 6))
        self.linear.weight.register_post_accumulate_grad_hook(self.drain)

    def drain(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self.total += weight.grad
        weight.grad = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_hook_that_takes_the_gradient_away_finds_it_complete(name: str) -> None:
    module = Stages(Drained)(0)
    x, y = make_batch(9, 0)
    (expected,) = torch.autograd.grad(squared_error(module(x), y), [module.linear.weight])  # type: ignore[union-attr, list-item]
    with Pipeline({0: module}, schedule=schedule_of(name, 1), loss_fn=squared_error) as pipe:
        pipe.forward_backward(x, y)
    torch.testing.assert_close(module.total, expected, rtol=1e-12, atol=1e-12)
    assert module.linear.weight.grad is None  # type: ignore[union-attr]
