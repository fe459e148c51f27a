"""Peers: torch.distributed.pipelining and loops written by hand, on the same modules over gloo."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from stagewright.bench.torch_schedules import TORCH_NAMES
from stagewright.engine import RankContext

# Our names of all schedules that torch runs, and its own.
TORCH_SCHEDULES: Final[Mapping[str, str]] = MappingProxyType({"gpipe": "GPipe", "1f1b": "1F1B", **TORCH_NAMES})
_FLAT: Final = ("gpipe", "1f1b")  # which take one stage a rank

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """The mean over all elements."""
    return ((output - target) ** 2).mean()


def make_group() -> dist.ProcessGroup:
    """A process group for what talks over torch alone, so that it never meets an engine's message."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "every rank is in it"
    return group


class TorchPeer:
    """A step of torch's own pipeline, with the optimizer's.

    Args:
        schedule: our name of it.
        modules: this rank's, by stage.
        num_stages, num_microbatches: the shape.
        loss_fn: (output, target) -> mean.
        group: of all ranks.
    """

    def __init__(
        self,
        schedule: str,
        modules: Mapping[int, nn.Module],
        num_stages: int,
        num_microbatches: int,
        loss_fn: LossFunction,
        group: dist.ProcessGroup,
    ) -> None:
        cpu = torch.device("cpu")
        stages = [PipelineStage(module, index, num_stages, cpu, group=group) for index, module in modules.items()]
        kind: Any = get_schedule_class(TORCH_SCHEDULES[schedule])
        self._schedule = kind(stages[0] if schedule in _FLAT else stages, num_microbatches, loss_fn=loss_fn)
        self._optimizer = _optimizer(modules)
        self._owns_first, self._owns_last = 0 in modules, num_stages - 1 in modules

    def step(self, x: Tensor, y: Tensor) -> None:
        """One batch."""
        inputs = (x,) if self._owns_first else ()
        targets: dict[str, Any] = {"target": y, "losses": []} if self._owns_last else {}
        self._schedule.step(*inputs, **targets, return_outputs=False)
        self._optimizer.step()
        self._optimizer.zero_grad()


class HandWritten:
    """What every loop below has: one stage a rank, and messages of one known shape.

    Args:
        context: this rank.
        module: its stage.
        num_microbatches: of a batch.
        loss_fn: (output, target) -> mean.
        group: of all ranks.
    """

    def __init__(
        self,
        context: RankContext,
        module: nn.Module,
        num_microbatches: int,
        loss_fn: LossFunction,
        group: dist.ProcessGroup,
    ) -> None:
        self.rank, self.num_ranks = context.rank, context.num_ranks
        self.module, self.num_microbatches, self.loss_fn, self.group = module, num_microbatches, loss_fn, group
        self.is_first, self.is_last = self.rank == 0, self.rank == self.num_ranks - 1
        self.optimizer = _optimizer({self.rank: module})
        self.stash: list[tuple[Tensor, Tensor]] = []  # (input, output or loss), the oldest first

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The forward of one microbatch, whose input is of x's shape; gives what goes to the next stage."""
        if not self.is_first:
            x = torch.empty_like(x)
            dist.recv(x, self.rank - 1, group=self.group)
            x.requires_grad_()
        output: Tensor = self.module(x)
        if self.is_last:
            output = self.loss_fn(output, y) / self.num_microbatches
        self.stash.append((x, output))
        return output.detach()

    def backward(self) -> Tensor | None:
        """The backward of the oldest microbatch; gives what goes to the stage before."""
        x, output = self.stash.pop(0)
        if self.is_last:
            output.backward()  # type: ignore[no-untyped-call]
        else:
            dy = torch.empty_like(output)
            dist.recv(dy, self.rank + 1, group=self.group)
            output.backward(dy)  # type: ignore[no-untyped-call]
        return x.grad

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class GPipeLoop(HandWritten):
    """All forwards, then all backwards, with blocking sends and receives."""

    def step(self, x: Tensor, y: Tensor) -> None:
        """One batch."""
        for rows, targets in zip(x.chunk(self.num_microbatches), y.chunk(self.num_microbatches)):
            output = self.forward(rows, targets)
            if not self.is_last:
                dist.send(output, self.rank + 1, group=self.group)
        for _ in range(self.num_microbatches):
            dx = self.backward()
            if dx is not None and not self.is_first:
                dist.send(dx, self.rank - 1, group=self.group)
        self.update()


class OneForwardOneBackwardLoop(HandWritten):
    """Warmup, one forward and one backward by turns, cooldown; sends do not block, receives do."""

    def step(self, x: Tensor, y: Tensor) -> None:
        """One batch."""
        self._sends: list[tuple[Any, Tensor]] = []
        microbatches = list(zip(x.chunk(self.num_microbatches), y.chunk(self.num_microbatches)))
        num_warmup = min(self.num_ranks - 1 - self.rank, self.num_microbatches)
        for microbatch in microbatches[:num_warmup]:
            self._forward_and_send(*microbatch)
        for microbatch in microbatches[num_warmup:]:
            self._forward_and_send(*microbatch)
            self._backward_and_send()
        for _ in range(num_warmup):
            self._backward_and_send()
        for work, _ in self._sends:
            work.wait()
        self.update()

    def _forward_and_send(self, x: Tensor, y: Tensor) -> None:
        output = self.forward(x, y)
        if not self.is_last:
            self._send(output, self.rank + 1)

    def _backward_and_send(self) -> None:
        dx = self.backward()
        if dx is not None and not self.is_first:
            self._send(dx, self.rank - 1)

    def _send(self, tensor: Tensor, destination: int) -> None:
        self._sends.append((dist.isend(tensor, destination, group=self.group), tensor))


def _optimizer(modules: Mapping[int, nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.SGD([weight for module in modules.values() for weight in module.parameters()], lr=1e-3)
