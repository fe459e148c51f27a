"""Split backward gives the gradients of a plain loop, whatever a stage is made of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from modules import Stages
from scenario import Scenario, assert_alike
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations


class TwiceUsed(nn.Module):
    """One weight, used twice in a row and once beside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x).tanh()) + self.linear(x)


class Chunked(nn.Module):
    """Operations with several outputs, one of which nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(6, 24)
        self.narrow = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        first, second, _, _ = self.widen(x).chunk(4, dim=-1)
        third, fourth = (first * second).split([2, 4], dim=-1)
        return self.narrow(torch.cat([fourth, third], dim=-1))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class FrozenParts(nn.Module):
    """A frozen weight with a trained bias, the reverse, and a linear that is frozen whole."""

    def __init__(self) -> None:
        super().__init__()
        self.bias_only, self.weight_only, self.frozen = (nn.Linear(6, 6) for _ in range(3))
        self.bias_only.weight.requires_grad_(False)
        self.weight_only.bias.requires_grad_(False)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.weight_only(self.bias_only(x).tanh()).tanh())


class Scale(torch.autograd.Function):
    """y = x * w, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return dy * weight, (dy * x).sum(0)


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Scale.apply(self.linear(x), self.scale)
        return y


class Again(torch.autograd.Function):
    """A checkpoint made by hand: its backward runs the function again and asks ``torch.autograd.grad``."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.function, ctx.weights = function, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.function(x)
            return None, *torch.autograd.grad(y, (x, *ctx.weights), dy)


class HandMadeCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Again.apply(self.inner, self.outer(x), *self.inner.parameters())
        return y


class Penalised(nn.Module):
    """A gradient is taken inside the forward, and a gradient of that gradient in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        point = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.linear(point).tanh().sum(), point, create_graph=True)
        return self.linear(x) + slope


class Inward(nn.Module):
    """Descends inside its forward, and uses the gradient at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            self.inner(x.detach()).square().mean().backward()
        assert self.inner.weight.grad is not None
        slope, self.inner.weight.grad, self.inner.bias.grad = self.inner.weight.grad, None, None
        return self.outer(x @ (self.inner.weight.detach() - slope))


class Product(nn.Module):
    """``x @ w`` and ``addmm`` with the weight the other way round, as Hugging Face's Conv1D has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(0.1 * torch.randn(6, 6)) for _ in range(3))
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.matmul((x @ self.first).unsqueeze(1), self.second).squeeze(1)
        return torch.addmm(self.bias, x, self.third)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(1, 4, 3, padding=1, stride=2)
        self.two = nn.Conv2d(4, 4, (1, 3), padding=(0, 1), groups=2, bias=False)
        self.same = nn.Conv1d(4, 2, 3, padding="same")
        self.transposed = nn.ConvTranspose1d(2, 2, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x.unsqueeze(1))
        x = self.two(x.unsqueeze(2)).squeeze(2)
        return self.transposed(self.same(x)).sum(1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(-1, 1, 6).expand(-1, 3, -1))[:, 1]


class Elsewise(nn.Module):
    """What no table knows: weights behind a parametrization, a recurrence, a bilinear form, a vmap, rows one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(6, 6))
        self.recurrence = nn.GRU(6, 6, batch_first=True)
        self.bilinear = nn.Bilinear(6, 6, 6)
        self.mapped = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.recurrence(self.normed(x).unsqueeze(1))
        x = torch.func.vmap(self.mapped)(self.bilinear(x.squeeze(1), x.squeeze(1)))
        return torch.stack([self.mapped(row) for row in x])


class ComplexWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.complex128)
        self.factor = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x.to(torch.complex128)) @ self.factor).real


class Masked(nn.Module):
    """In training, the second half of the batch never reaches the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x[0, 0] > 0 else x.tanh()


MODULES = [
    TwiceUsed,
    Chunked,
    Normed,
    FrozenParts,
    CustomFunction,
    HandMadeCheckpoint,
    Penalised,
    Inward,
    Product,
    Convolutions,
    Attention,
    Elsewise,
    ComplexWeights,
    Masked,
]


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("recompute", ["off", "full"])
def test_equals_plain_loop(kind: Callable[[], nn.Module], recompute: str) -> None:
    assert_alike(Scenario(Stages(kind)), "zb-h1", num_ranks=3, num_microbatches=4, recompute=recompute)


@pytest.mark.parametrize("options", [{}, {"padding_idx": -2}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_embedding_of_integers(options: dict[str, Any]) -> None:
    def embedding() -> nn.Module:
        return nn.Sequential(nn.Embedding(7, 6, **options), nn.Linear(6, 6))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 7, (9, 3), generator=generator)
        return tokens, torch.randn(9, 3, 6, generator=generator, dtype=torch.float64)

    assert_alike(Scenario(Stages(embedding, nn.Identity), batch), "zb-h1")


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_stage_that_is_frozen_whole(frozen: int) -> None:
    def stage(index: int) -> nn.Module:
        return Stages(Normed)(index).requires_grad_(index != frozen)

    assert_alike(Scenario(stage), "zb-h1", num_ranks=3)


@pytest.mark.parametrize("shape", [(9, 6), (9, 2, 6), (9, 2, 1, 6), (9, 0, 6)])
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]

    def total(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).sum() / len(output)

    assert_alike(Scenario(Stages(TwiceUsed), batch, total), "zb-h1")


def test_autocast() -> None:
    """Under autocast the linears compute in bfloat16; their weights' gradients stay float32."""

    class Lower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TwiceUsed().float()
            self.wide = nn.Linear(6, 6).double()

        def forward(self, x: Tensor) -> Tensor:
            x = self.wide(x)  # autocast leaves float64 alone
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x.float()).double()

    def stage(index: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(index)
            return Lower()

    assert_alike(Scenario(stage), "zb-h1", tolerance=1e-2)


def test_nn_attention_is_put_off_too() -> None:
    """torch hands its attention function to a mode whole; the linears inside must be seen nevertheless."""
    from stagewright.engine.stages.deferral import Deferred, Deferring

    module = Attention().double()
    deferred = Deferred()
    x = torch.randn(2, 6, dtype=torch.float64)
    with Deferring(deferred):
        y = module(x)
    with Deferring(deferred), deferred:
        y.sum().backward()
    waiting = {name for name, parameter in module.named_parameters() if parameter.grad is None}
    assert waiting == {name for name, _ in module.named_parameters() if "norm" not in name}
    deferred.finish()
    expected = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    torch.testing.assert_close([parameter.grad for parameter in module.parameters()], list(expected))


def test_functional_linear_by_keywords() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(bias=self.bias, weight=self.weight, input=x)

    assert_alike(Scenario(Stages(ByName)), "zb-h1")
