"""Stages whose parameters are spread over several ranks: sharded by FSDP2, or tensor parallel; and how they train."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from data_parallel import share_of
from plain import Result, make_batch, make_stage, momentum, squared_error
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from stagewright.engine import Pipeline, RankContext, make_mesh


class Feed(nn.Module):
    """A stage that tensor parallelism cuts: a wide layer and a narrow one, behind a norm that all ranks have whole."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.widen = nn.Linear(6, 8)
        self.narrow = nn.Linear(8, 6)
        self.double()
        generator = torch.Generator().manual_seed(40 + stage)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.narrow(self.widen(self.norm(x)).tanh())
        return y


class Build:
    """stage -> module, spread over the dimensions of a mesh.

    Args:
        mesh: with ``dp`` or ``tp``.
        kind: ``whole``, the blocks of the other tests; ``sharded``: their linears each by itself and the block around
            them; ``mixed``: the first stage sharded, the others whole; ``parallel``: cut over ``tp``; ``both``: that,
            and sharded.
    """

    def __init__(self, mesh: DeviceMesh | None, kind: str) -> None:
        self._mesh = mesh
        self._kind = kind

    def __call__(self, stage: int) -> nn.Module:
        module: nn.Module = Feed(stage) if self._kind in ("parallel", "both") else make_stage(stage)
        mesh: Any = self._mesh
        if mesh is None:
            return module
        if self._kind in ("parallel", "both"):
            parallelize_module(module, mesh["tp"], {"widen": ColwiseParallel(), "narrow": RowwiseParallel()})
        if self._kind in ("sharded", "both") or (self._kind == "mixed" and stage == 0):
            for part in ("widen", "narrow"):
                fully_shard(module.get_submodule(part), mesh=mesh["dp"])
            fully_shard(module, mesh=mesh["dp"])
        return module


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_spread(
    context: RankContext, sizes: dict[str, int], kind: str, parts: Sequence[int], options: dict[str, Any]
) -> tuple[Result, list[float | None], list[str]]:
    """What ``data_parallel.train_replica`` does, with the norms; and what is seen of the parameters between steps."""
    torch.set_num_threads(1)
    mesh: Any = make_mesh(**sizes, context=context)
    result, norms, kinds = Result(), [], []
    options = {"loss_fn": squared_error, "optimizer": momentum, **options}
    with Pipeline(Build(mesh, kind), mesh=mesh, share_loss=True, **options) as pipe:
        for step in range(2):
            loss = pipe.train_step(*share_of(make_batch(sum(parts), step), parts, pipe.replica))
            assert loss is not None
            result.losses.append(loss.item())
            norms.append(pipe.grad_norm)
        evaluated = pipe.eval_step(*share_of(make_batch(sum(parts), 99), parts, pipe.replica), num_microbatches=2)
        assert evaluated is not None
        result.losses.append(evaluated.item())
        for step in (2, 3):
            pipe.forward_backward(*share_of(make_batch(sum(parts), step), parts, pipe.replica))
        norms.append(pipe.clip_grad_norm_(1e9))
        for stage, module in pipe.modules.items():
            for name, parameter in module.named_parameters():
                kinds.append(type(parameter).__name__)
                result.weights[stage, name] = whole(parameter.detach()).clone()
                assert parameter.grad is not None
                result.gradients[stage, name] = whole(parameter.grad).clone()
        kinds += [str(instruction) for instruction in pipe.program.streams[pipe.rank]]
    return result, norms, kinds


def train_plainly(num_stages: int, kind: str, rows: int, max_norm: float | None) -> tuple[Result, list[float | None]]:
    """The same in one process."""
    build = Build(None, kind)
    stages = [build(stage) for stage in range(num_stages)]
    model = nn.Sequential(*stages)
    optimizer = momentum(model.parameters())
    result, norms = Result(), []
    for step in range(2):
        x, y = make_batch(rows, step)
        optimizer.zero_grad()
        loss = squared_error(model(x), y)
        loss.backward()
        norms.append(None if max_norm is None else nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        result.losses.append(loss.item())
    optimizer.zero_grad()
    x, y = make_batch(rows, 99)
    result.losses.append(squared_error(model(x), y).item())
    for step in (2, 3):
        x, y = make_batch(rows, step)
        squared_error(model(x), y).backward()
    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
    for stage, module in enumerate(stages):
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            result.weights[stage, name] = parameter.detach().clone()
            result.gradients[stage, name] = parameter.grad.clone()
    return result, norms


def refuse(context: RankContext, kind: str, options: dict[str, Any], error: str, *, with_mesh: bool = True) -> None:
    """A pipeline that cannot be built."""
    mesh: Any = make_mesh(pp=2, dp=2, context=context)
    rest = {"mesh": mesh} if with_mesh else {"transport": context.transport}
    options = {"loss_fn": squared_error, "optimizer": momentum, **rest, **options}
    with pytest.raises(ValueError, match=error):
        Pipeline(Build(mesh, kind), **options)


def run_all(context: RankContext, tasks: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Several functions one after the other: starting processes takes long."""
    return [function(context, *args) for function, args in tasks]
