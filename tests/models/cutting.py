"""A model in stages over ranks, held against the same model in one piece."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.models import Cut, CuttableModel, build_stage, cut_evenly
from stagewright.schedules import create

SEED = 3
NUM_MICROBATCHES = 4
TOLERANCE = 1e-12

# One stage a rank, and two: eight stages of every model on four ranks.
SHAPES = [("1f1b", 1), ("1f1b", 2), ("1f1b", 4), ("zbv", 1), ("zbv", 2), ("zbv", 4), ("interleaved", 4)]


@dataclass
class Result:
    """The loss of one batch, and the gradient of every parameter by its name in the whole model."""

    loss: float
    gradients: dict[str, Tensor]


def whole_of(model: CuttableModel) -> nn.Module:
    """The unsplit model in float64."""
    return model.build(range(len(model.parts)), seed=SEED, dtype=torch.float64)


def in_one_piece(module: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Result:
    """Loss and gradients of a plain module."""
    loss = loss_of(module)
    loss.backward()
    return Result(loss.item(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None})


def train_stages(
    context: RankContext, model: CuttableModel, cut: Cut, x: Any, y: Any, keywords: dict[str, Any], options: Any
) -> Result:
    """Loss and gradients of one rank's stages."""
    build = partial(build_stage, model, cut, seed=SEED, dtype=torch.float64)
    with Pipeline(build, transport=context.transport, share_loss=True, **options) as pipe:
        loss = pipe.forward_backward(x, y, **keywords)
        assert loss is not None
        parameters = [pair for module in pipe.modules.values() for pair in module.named_parameters()]
        return Result(loss.item(), {name: p.grad for name, p in parameters if p.grad is not None})


def in_stages(
    model: CuttableModel,
    name: str,
    num_ranks: int,
    x: Any,
    y: Any,
    *,
    cut: Callable[[int], Cut] | None = None,
    keywords: dict[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Loss and gradients over thread ranks; the same name on several stages is a tied weight, equal everywhere."""
    schedule = create(name, num_ranks=num_ranks, num_microbatches=NUM_MICROBATCHES)
    chosen = cut_evenly(model.parts, schedule.num_stages) if cut is None else cut(schedule.num_stages)
    arguments = (model, chosen, x, y, keywords or {}, {"schedule": schedule, **options})
    results: list[Result] = launch_local(train_stages, num_ranks, backend="threads", args=arguments)
    assert len({result.loss for result in results}) == 1
    gradients: dict[str, Tensor] = {}
    for result in results:
        assert not gradients.keys() & result.gradients.keys(), "every layer is on one stage"
        gradients |= result.gradients
    return Result(results[0].loss, gradients)


def assert_same(actual: Result, expected: Result) -> None:
    """Loss and all gradients agree to 1e-12."""
    assert actual.loss == pytest.approx(expected.loss, rel=TOLERANCE, abs=TOLERANCE)
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(
            actual.gradients[name], gradient, rtol=TOLERANCE, atol=TOLERANCE, msg=partial(named, name)
        )


def named(name: str, message: str) -> str:
    """A message that says which parameter it is about."""
    return f"{name}: {message}"


class Memory(TorchDispatchMode):
    """Notes the shape of every tensor that takes memory while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and not leaf.is_meta and leaf.untyped_storage()._cdata not in known:
                self.shapes.append(tuple(leaf.shape))
        return outputs


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, also those that no state dict has."""
    yield from module.parameters()
    yield from module.buffers()


def assert_stages_take_only_their_own_memory(model: CuttableModel, cut: Cut) -> None:
    """No tensor is ever made that is larger than one of the stage's own, and none of a shape that only others have.

    Filling a parameter may take memory of its shape a second time, for a moment.
    """
    own = [{tuple(t.shape) for t in tensors_of(build_stage(model, cut, stage))} for stage in range(cut.num_stages)]
    everything = set().union(*own)
    for stage in range(cut.num_stages):
        with Memory() as memory:
            module = build_stage(model, cut, stage)
        assert not any(tensor.is_meta for tensor in tensors_of(module)), "everything of the stage itself is there"
        assert not set(memory.shapes) & (everything - own[stage]), f"stage {stage} made something of another stage"
        numbers_made = sum(torch.Size(shape).numel() for shape in memory.shapes)
        numbers_held = sum(tensor.numel() for tensor in tensors_of(module))
        assert numbers_made <= 2.5 * numbers_held + 20_000 // 8, f"stage {stage}"
