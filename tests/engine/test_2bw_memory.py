"""What old weights cost, counted in bytes: two copies of the weights, one gradient, one state of the optimizer."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from plain import make_batch, squared_error
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.engine.updates.weights import StageWeights

WIDTH = 32
# Bytes of one stage's weights: two matrices and a vector.
WEIGHTS = (2 * WIDTH * WIDTH + WIDTH) * 8


class Wide(nn.Module):
    """Weights that are larger than activations."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.frozen = nn.Parameter(torch.ones(1000, dtype=torch.float64), requires_grad=False)
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.embedding(x).tanh())
        return y


def num_bytes(tensors: Sequence[Tensor]) -> int:
    """Of all memory behind some tensors, each piece once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def versions_of(weights: StageWeights) -> list[Tensor]:
    """All versions of a stage's weights that are in memory."""
    versions: Any = getattr(weights, "_versions", None)
    if versions is None:
        return list(weights.trained.values())
    return [parameter for version in versions for parameter in version.parameters.values()]


class Gradients:
    """Sees how many bytes of weight gradients are alive, whenever a backward or an update has ended."""

    def __init__(self, weights: StageWeights) -> None:
        self._weights: Any = weights
        self.peak = 0
        for name in ("end_backward", "bring_gradients", "begin_update"):
            setattr(weights, name, self._watched(getattr(weights, name)))

    def _watched(self, method: Any) -> Any:
        def call(*arguments: Any) -> None:
            method(*arguments)
            sums = [gradient for of_update in self._sums() for gradient in of_update.values()]
            alive = [parameter.grad for parameter in self._weights.trained.values() if parameter.grad is not None]
            self.peak = max(self.peak, num_bytes([*sums, *alive]))

        return call

    def _sums(self) -> list[dict[str, Tensor]]:
        return list(getattr(self._weights, "_gradients", {}).values())


def bytes_of_rank(context: RankContext, schedule: str, options: dict[str, Any]) -> tuple[int, int, int, int]:
    """Weights, the most of gradients, the optimizer's state, and gradient buffers as the program has them."""
    torch.set_num_threads(1)
    with Pipeline(
        Wide,
        schedule=schedule,
        num_microbatches=4,
        loss_fn=squared_error,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01, momentum=0.9),
        transport=context.transport,
        **options,
    ) as pipe:
        weights = pipe._assembly.weights[context.rank]
        gradients = Gradients(weights)
        for step in range(5):
            pipe.train_step(*make_batch(8, step, WIDTH))
        assert pipe.optimizer is not None
        state = [value["momentum_buffer"] for value in pipe.optimizer.state.values()]
        found = num_bytes(versions_of(weights)), gradients.peak, num_bytes(state)
        return *found, pipe.program.updates.num_gradient_buffers


def on_ranks(schedule: str, num_ranks: int = 4, **options: Any) -> list[tuple[int, int, int, int]]:
    return launch_local(bytes_of_rank, num_ranks, backend="threads", args=(schedule, options))


def test_2bw_has_two_copies_of_the_weights_one_gradient_and_one_state() -> None:
    """What is frozen is there once, and not among these."""
    for found in on_ranks("2bw"):
        assert found == (2 * WEIGHTS, WEIGHTS, WEIGHTS, 1)


@pytest.mark.parametrize("options", [{"max_norm": 0.1}, {"loss_scale": "dynamic"}], ids=["clips", "scales"])
def test_a_second_gradient_where_updates_wait_for_other_ranks(options: dict[str, Any]) -> None:
    """As the program says. The rank that hears of all others at once, having been the last to tell, needs none."""
    found = on_ranks("2bw", **options)
    assert [(weights, state, buffers) for weights, _, state, buffers in found] == [(2 * WEIGHTS, WEIGHTS, 2)] * 4
    assert [gradients for _, gradients, _, _ in found] == [2 * WEIGHTS] * 4


def test_a_second_gradient_only_on_ranks_that_share_a_weight() -> None:
    """The first and the last stage are tied here; those in between step as soon as they have their gradients."""
    found = on_ranks("2bw", tied=[["stage0.embedding.weight", "stage3.embedding.weight"]])
    assert [gradients for _, gradients, _, _ in found] == [2 * WEIGHTS, WEIGHTS, WEIGHTS, 2 * WEIGHTS]


def test_pipedream_stashes_a_version_for_each_microbatch_in_flight() -> None:
    """P-r of them on rank r; with vertical sync, P on every rank."""
    assert on_ranks("pipedream") == [((4 - rank) * WEIGHTS, WEIGHTS, WEIGHTS, 1) for rank in range(4)]
    assert on_ranks("pipedream", vertical_sync=True) == [(4 * WEIGHTS, WEIGHTS, WEIGHTS, 1)] * 4


def test_a_single_rank_of_pipedream_needs_no_versions() -> None:
    assert on_ranks("pipedream", num_ranks=1) == [(WEIGHTS, WEIGHTS, WEIGHTS, 1)]


class Copies(TorchDispatchMode):
    """Counts the elements that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.num_elements += args[0].numel()
        return func(*args, **(kwargs or {}))


class Silent(torch.optim.Optimizer):
    """Does nothing, so that what is copied is not its doing."""

    def __init__(self, named: Any) -> None:
        super().__init__(named, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return


def test_an_update_copies_the_weights_once_and_all_else_does_not() -> None:
    """Of every weight, into the buffer that is free; switching between versions copies nothing."""
    with Pipeline({0: Wide(0)}, schedule="2bw", num_microbatches=4, loss_fn=squared_error, optimizer=Silent) as pipe:
        pipe.train_step(*make_batch(8, 0, WIDTH))
        batch = make_batch(8, 1, WIDTH)
        with Copies() as copies:
            pipe.train_step(*batch)
        activations = 4 * 8 * WIDTH  # what the backward of a small batch may copy, at most
        assert WEIGHTS // 8 <= copies.num_elements <= WEIGHTS // 8 + activations


def test_the_weights_that_a_stage_came_with_are_released() -> None:
    """They live on in the versions."""
    module = Wide(0)
    before = [weakref.ref(module.embedding.weight), weakref.ref(module.head.weight), weakref.ref(module.head.bias)]
    with Pipeline({0: module}, schedule="2bw", num_microbatches=4, loss_fn=squared_error, optimizer=Silent):
        gc.collect()
        assert [reference() for reference in before] == [None] * 3
