"""The measure of the engine: a plain loop in one process, and the small model that both train."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext
from stagewright.engine.transport.threads import ThreadTransport

TOLERANCE = 1e-12


class Block(nn.Module):
    """A small residual block with all that split backward must get right: linears, a norm, a weight used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width, bias=False)
        self.twice = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.widen(self.norm(x)).chunk(2, dim=-1)
        x = x + self.narrow(torch.cat([left.tanh(), right], dim=-1))
        return x + self.twice(self.twice(x).tanh())


def make_stage(stage: int, width: int = 6) -> nn.Module:
    """The same module for a stage whoever asks."""
    module = Block(width).double()
    generator = torch.Generator().manual_seed(100 + stage)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def make_batch(rows: int, step: int, width: int = 6) -> tuple[Tensor, Tensor]:
    """The batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, width, generator=generator, dtype=torch.float64)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Mean over the rows."""
    return ((output - target) ** 2).mean()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer with state."""
    return torch.optim.SGD(parameters, lr=0.03, momentum=0.9)


@dataclass
class Result:
    """What a training leaves.

    Losses of the steps; by (stage, name) the weights, and the gradients of one more batch on them; and what the trained
    model predicts.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    weights: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    outputs: Tensor | None = None


def train_plainly(
    num_stages: int, rows: int, steps: int, stage: Callable[[int], nn.Module] = make_stage, loss: Any = squared_error
) -> Result:
    """The whole model on the whole batch in one process."""
    modules = [stage(index) for index in range(num_stages)]
    model = nn.Sequential(*modules)
    optimizer = momentum(model.parameters())
    result = Result()
    for step in range(steps):
        x, y = make_batch(rows, step)
        optimizer.zero_grad()
        batch_loss = loss(model(x), y)
        batch_loss.backward()
        result.losses.append(batch_loss.item())
        optimizer.step()
    optimizer.zero_grad()
    x, y = make_batch(rows, steps)
    loss(model(x), y).backward()
    note_parameters(result, dict(enumerate(modules)))
    result.outputs = model(make_batch(rows, 99)[0]).detach()
    return result


def train_many(context: RankContext, cases: Sequence[tuple[int, int, dict[str, Any]]]) -> list[Result]:
    """Several trainings one after the other, each (rows, steps, options): starting processes takes long."""
    return [train_pipelined(context, *case) for case in cases]


def note_parameters(result: Result, modules: Mapping[int, nn.Module]) -> None:
    """Keep the weights and gradients of some stages."""
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            result.weights[stage, name] = parameter.detach().clone()
            if parameter.grad is not None:
                assert not parameter.grad.requires_grad
                result.gradients[stage, name] = parameter.grad.clone()


def train_pipelined(context: RankContext, rows: int, steps: int, options: dict[str, Any]) -> Result:
    """One rank's share of the same training."""
    torch.set_num_threads(1)
    options = {"build_stage": make_stage, "loss_fn": squared_error, **options}
    with Pipeline(optimizer=momentum, transport=context.transport, share_loss=True, **options) as pipe:
        result = Result()
        for step in range(steps):
            loss = pipe.train_step(*make_batch(rows, step))
            assert loss is not None
            result.losses.append(loss.item())
            assert_nothing_in_flight(pipe)
        pipe.forward_backward(*make_batch(rows, steps))
        assert_nothing_in_flight(pipe)
        note_parameters(result, pipe.modules)
        result.outputs = pipe.predict(make_batch(rows, 99)[0])
        assert_nothing_in_flight(pipe)
        context.transport.gather(b"")  # all ranks are through: whatever lies in a queue now is left over
        if isinstance(context.transport, ThreadTransport):
            assert context.transport._hub.num_waiting == 0
        return result


def assert_nothing_in_flight(pipe: Pipeline) -> None:
    """Stashes and queues are empty after a step."""
    for stage in pipe._stages.values():
        assert not stage.stash
        assert not stage._pending
    for executor in (*pipe._training._executors.values(), *pipe._evaluation.executors.values()):
        assert executor._mail.is_empty


def assert_same(results: list[Result], plain: Result) -> None:
    """Every rank saw the plain loop's losses, and its stages have the plain loop's weights and gradients."""
    for result in results:
        assert result.losses == pytest.approx(plain.losses, rel=TOLERANCE, abs=TOLERANCE)
        assert set(result.gradients) == set(result.weights) & set(plain.gradients)
        for ours, theirs in ((result.weights, plain.weights), (result.gradients, plain.gradients)):
            for key, tensor in ours.items():
                torch.testing.assert_close(tensor, theirs[key], rtol=TOLERANCE, atol=TOLERANCE)
    assert {key for result in results for key in result.weights} == set(plain.weights)
    outputs = [result.outputs for result in results if result.outputs is not None]
    assert outputs
    for output in outputs:
        torch.testing.assert_close(output, plain.outputs, rtol=TOLERANCE, atol=TOLERANCE)
