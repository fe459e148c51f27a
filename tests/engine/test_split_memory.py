"""Between I and W a stage holds the input and the output gradient of each weighted operation, and nothing else."""

import gc
import weakref
from typing import Any

import pytest
import torch
from metering import SCALARS, metering
from plain import Block, make_batch, make_stage, squared_error
from torch import Tensor, nn

from stagewright.engine import Pipeline
from stagewright.engine.stages.randomness import Seeds
from stagewright.engine.stages.stage import Stage
from stagewright.engine.value import pack
from stagewright.models import GPTConfig
from stagewright.models.gpt_layers import Layer

CPU = torch.device("cpu")
HIDDEN = 64


class TransformerBlock(nn.Module):
    """The demo model's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(GPTConfig(vocab_size=256, hidden_size=HIDDEN, num_heads=4, num_layers=1), 0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x, None)
        return y


def split_stage(module: nn.Module) -> Stage:
    return Stage(1, module, Seeds(0, CPU), splits_backward=True)


def run_forward(stage: Stage, microbatch: int, x: Tensor) -> Tensor:
    packed = pack(x.detach().requires_grad_(), "the test")
    output = stage.forward(microbatch, (0, microbatch), packed, {}, 0)
    return stage.hand_on(microbatch, output).tensors[0]


def storages(tensors: list[Tensor]) -> dict[int, int]:
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def test_a_transformer_block_holds_less_after_i_than_after_f() -> None:
    stage = split_stage(TransformerBlock())
    x = torch.randn(4, 32, HIDDEN)
    dy = torch.randn_like(x)
    run_forward(stage, 0, x)  # the first time, gradients of the norms come into being
    stage.backward(0, [dy])
    with metering() as after_forward:
        output = run_forward(stage, 1, x)
        del output
    with metering() as by_input_gradient:
        stage.input_gradient(1, [dy])
    after_input_gradient = after_forward.held + by_input_gradient.held
    kept = storages(stage._pending[1].tensors)
    kept.pop(dy.untyped_storage().data_ptr(), None)  # the meter did not see these come
    kept.pop(x.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) <= after_input_gradient <= sum(kept.values()) + SCALARS
    assert after_input_gradient <= after_forward.held
    with metering() as by_weight_gradient:
        stage.weight_gradient(1)
    assert after_input_gradient + by_weight_gradient.held <= SCALARS


class Token:
    """Something whose end can be watched."""


class Tokened(torch.autograd.Function):
    """Leaves a token at its graph node, as any user's function may leave tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def test_no_graph_node_outlives_i() -> None:
    tokens: list[weakref.ref[Token]] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            for linear in (self.first, self.second):
                token = Token()
                tokens.append(weakref.ref(token))
                x = Tokened.apply(linear(Tokened.apply(x, token)).tanh(), token)
            return x

    stage = split_stage(Watched())
    gc.disable()  # they must go at once, without being collected
    try:
        dy = torch.ones_like(run_forward(stage, 0, torch.randn(3, 6)))  # and the output is handed on
        assert all(token() is not None for token in tokens)
        stage.input_gradient(0, [dy])
        assert all(token() is None for token in tokens)
        assert stage._pending[0].tensors
    finally:
        gc.enable()


def test_the_weight_gradient_comes_at_w() -> None:
    stage = split_stage(Block(6))
    output = run_forward(stage, 0, torch.randn(3, 6))
    stage.input_gradient(0, [torch.ones_like(output)])
    missing = {name for name, parameter in stage.module.named_parameters() if parameter.grad is None}
    assert missing == {"widen.weight", "widen.bias", "narrow.weight", "twice.weight", "twice.bias"}
    stage.weight_gradient(0)
    for parameter in stage.module.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.requires_grad, "a gradient with a graph would keep all of its microbatches alive"
    assert not stage._pending


class Counting(nn.Module):
    """Notes how much its stage holds whenever it is called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.stage: Stage | None = None
        self.held: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        assert self.stage is not None
        self.held.append(len(self.stage.stash) + len(self.stage._pending))
        y: Tensor = self.inner(x)
        return y


@pytest.mark.parametrize("name", ["zb-h1", "interleaved-zb"])
def test_peak_is_flat_in_the_number_of_microbatches(name: str) -> None:
    """As many entries and, a few scalars apart, as many bytes for 24 microbatches as for 6."""
    peaks = {}
    for num_microbatches in (6, 24):
        with Pipeline(make_stage, schedule=name, num_microbatches=num_microbatches, loss_fn=squared_error) as pipe:
            for index, stage in pipe._stages.items():
                stage.module = Counting(make_stage(index))
                stage.module.stage = stage
            pipe.forward_backward(*make_batch(50 * num_microbatches, 0))
            batch = make_batch(50 * num_microbatches, 1)
            with metering() as meter:
                pipe.forward_backward(*batch)
            modules = [stage.module for stage in pipe._stages.values()]
            assert all(len(module.held) == 2 * num_microbatches for module in modules), "no forward runs twice"
            peaks[num_microbatches] = (meter.peak, max(max(module.held) for module in modules))
    assert peaks[24][1] == peaks[6][1]
    assert peaks[24][0] <= peaks[6][0] + SCALARS
