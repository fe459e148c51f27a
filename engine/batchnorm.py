"""Batch norm: what it remembers for evaluation, where a batch comes in microbatches.

In training a batch norm normalises each microbatch by the microbatch's own mean and variance. Its running statistics
are updated with each microbatch in turn, as if it were a batch; or, deferred, once a batch with the mean and variance
of all the batch's rows, as if there were no microbatches (torchgpipe, Kim et al. 2020, has this as well).
"""

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from stagewright.engine.transport.group import Group, gather_rows
from stagewright.schedules import Placement

# What a batch norm has seen: (count, mean, sum of squared deviations) a channel; None for nothing.
Part: TypeAlias = tuple[Tensor, Tensor, Tensor] | None


def remembering(module: nn.Module) -> list[_NormBase]:
    """The norms of a module that have running statistics and update them."""
    norms = (norm for norm in module.modules() if isinstance(norm, _NormBase))
    return [norm for norm in norms if norm.track_running_stats and norm.running_mean is not None]


def check_norms(
    modules: Mapping[int, nn.Module], placement: Placement, num_replicas: int = 1, *, deferred: bool
) -> None:
    """Refuse norms that would remember something else than they should.

    Raises:
        ValueError: copies of a stage would see different microbatches, or nobody could see what a norm sees.
    """
    for stage, module in modules.items():
        for name, norm in _named(module):
            if len(placement.replicas_of(stage)) * num_replicas > 1 and not (deferred and isinstance(norm, _BatchNorm)):
                remedy = "track_running_stats=False" if deferred else "deferred_batch_norm=True"
                raise ValueError(
                    f"stage {stage} has several copies, each of which sees other microbatches: the running statistics "
                    f"of {name} would drift apart; give {remedy}, or take a schedule with one copy and no dp"
                )
        if deferred and _named(module) and any(_is_compiled(submodule) for submodule in module.modules()):
            raise ValueError(
                f"stage {stage} is compiled, so nobody can look into its batch norms: leave deferred_batch_norm out, "
                "or compile parts without a batch norm"
            )


class DeferredBatchNorms:
    """Context of one training batch: at its end each batch norm of a rank's stages learns of all its rows at once,
    those of all replicas of the pipeline.

    Args:
        modules: by stage.
        group: the same rank of all replicas.
    """

    def __init__(self, modules: Mapping[int, nn.Module], group: Group) -> None:
        self._group = group
        self._of_stages = {
            stage: [_Deferred(norm) for norm in remembering(module) if isinstance(norm, _BatchNorm)]
            for stage, module in modules.items()
        }

    def __enter__(self) -> None:
        for norm in self._all():
            norm.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._group.size > 1:
            for norm in self._all():
                self._join_replicas(norm)
        for norm in self._all():
            norm.end(learn=error is None)

    def parts(self, stage: int) -> list[Part]:
        """What the norms of a stage have seen on this rank so far."""
        return [norm.part for norm in self._of_stages.get(stage, ())]

    def join(self, stage: int, of_ranks: Sequence[Sequence[Part]]) -> None:
        """Let the norms of a stage have seen what all its copies have; each copy puts it together in the same order."""
        for norm, parts in zip(self._of_stages.get(stage, ()), zip(*of_ranks)):
            norm.part = None
            for part in parts:
                norm.add(part)

    def _join_replicas(self, norm: "_Deferred") -> None:
        """Let a norm have seen what it has in all replicas."""
        width = norm.num_features
        own = torch.zeros(1 + 2 * width, dtype=torch.float64)
        if norm.part is not None:
            own = torch.cat([number.detach().double().reshape(-1) for number in norm.part])
        norm.part = None
        for row in gather_rows(self._group, own):
            norm.add((row[0], row[1 : 1 + width], row[1 + width :]) if row[0] else None)

    def _all(self) -> Iterator["_Deferred"]:
        return (norm for of_stage in self._of_stages.values() for norm in of_stage)


class _Deferred:
    """One batch norm; within a batch it neither reads nor writes its running statistics."""

    def __init__(self, norm: _BatchNorm) -> None:
        self._norm = norm
        self.num_features = norm.num_features
        self._is_open = False
        self.part: Part = None
        norm.register_forward_pre_hook(self._see, with_kwargs=True)

    def begin(self) -> None:
        self._is_open = True
        self._norm.track_running_stats = False
        self.part = None

    def end(self, *, learn: bool) -> None:
        self._is_open = False
        self._norm.track_running_stats = True
        if learn:
            self._learn()
        self.part = None

    @torch.no_grad()
    def add(self, part: Part) -> None:
        """Join two parts of a batch (Chan et al. 1979, equations 2.1)."""
        if part is None or self.part is None:
            self.part = part or self.part
            return
        (count, mean, squares), (other_count, other_mean, other_squares) = self.part, part
        total = count + other_count
        difference = other_mean - mean
        self.part = (
            total,
            mean + difference * (other_count / total),
            squares + other_squares + difference.square() * (count * other_count / total),
        )

    def _see(self, norm: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before each forward; one within a backward is a repetition."""
        if not self._is_open or not norm.training or torch._C._current_graph_task_id() != -1:
            return
        x: Tensor = (args[0] if args else kwargs["input"]).detach()
        x = x if x.dtype == torch.float64 else x.float()
        others = [dimension for dimension in range(x.ndim) if dimension != 1]
        variance, mean = torch.var_mean(x, others, correction=0)
        count = mean.new_full((), x.numel() // x.shape[1])
        self.add((count, mean, variance * count))

    @torch.no_grad()
    def _learn(self) -> None:
        if self.part is None:
            return
        norm, (count, mean, squares) = self._norm, self.part
        factor = norm.momentum
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            factor = 1.0 / float(norm.num_batches_tracked) if factor is None else factor
        variance = squares / (count - 1).clamp(min=1)
        for remembered, new in ((norm.running_mean, mean), (norm.running_var, variance)):
            assert remembered is not None, "it has running statistics"
            remembered.lerp_(new.to(remembered.dtype), factor or 0.0)


class Untouched:
    """Context: norms remember afterwards what they did before; for a forward that repeats another.

    Others may hold on to the buffers themselves, so copies take their place for a while.

    Args:
        norms: which.
    """

    def __init__(self, norms: Sequence[_NormBase]) -> None:
        self._kept = [(norm, dict(norm._buffers)) for norm in norms]

    def __enter__(self) -> None:
        for norm, buffers in self._kept:
            norm._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})

    def __exit__(self, *_: object) -> None:
        for norm, buffers in self._kept:
            norm._buffers.update(buffers)


def _named(module: nn.Module) -> list[tuple[str, _NormBase]]:
    norms = remembering(module)
    return [(name, norm) for name, norm in module.named_modules() if any(norm is one for one in norms)]


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
