"""Batch norm: what it remembers for evaluation, where a batch comes in microbatches.

In training a batch norm normalises each microbatch by the microbatch's own mean and variance. Its running statistics
are updated with each microbatch in turn, as if it were a batch; or, deferred, once a batch with the mean and variance
of all the batch's rows, as if there were no microbatches (torchgpipe, Kim et al. 2020, has this as well).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from stagewright.engine.transport.group import Group, gather_rows
from stagewright.engine.updates.agreement import Agreement
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
    those of all copies of its stage and of all replicas of the pipeline.

    A batch's forwards are all done when its ``train_step`` ends, under an asynchronous schedule too, where its
    backwards, and the sums of its gradients, are not. So the copies tell each other then, and not with the gradients.

    Args:
        modules: by stage.
        placement: says which ranks hold a copy of which stage.
        agreement: brings what the copies of a stage have seen to each other.
        group: the same rank of all replicas.
    """

    def __init__(
        self, modules: Mapping[int, nn.Module], placement: Placement, agreement: Agreement, group: Group
    ) -> None:
        self._placement = placement
        self._agreement = agreement
        self._group = group
        self._of_stages = {
            stage: [_Deferred(norm) for norm in remembering(module) if isinstance(norm, _BatchNorm)]
            for stage, module in sorted(modules.items())
        }

    def __enter__(self) -> None:
        for norm in self._all():
            norm.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            for stage, norms in self._of_stages.items():
                self._join(norms, self._placement.replicas_of(stage))
        for norm in self._all():
            norm.end(learn=error is None)

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """While backwards that are left repeat forwards of earlier batches: as in those, and nothing is learned."""
        for norm in self._all():
            norm.begin()
        try:
            yield
        finally:
            for norm in self._all():
                norm.end(learn=False)

    def _join(self, norms: Sequence["_Deferred"], holders: Sequence[int]) -> None:
        """Let the norms of a stage have seen what they have on all ranks that hold it, and in all replicas.

        Everyone adds the same numbers up in the same order, so what they learn is the same to the last bit.
        """
        if not norms:
            return
        if len(holders) > 1:
            told = self._agreement.spread(_row_of(norms).numpy().tobytes(), holders, holders)
            _take(norms, [torch.frombuffer(bytearray(row), dtype=torch.float64) for row in told])
        if self._group.size > 1:
            _take(norms, gather_rows(self._group, _row_of(norms)).unbind())

    def _all(self) -> Iterator["_Deferred"]:
        return (norm for of_stage in self._of_stages.values() for norm in of_stage)


def _row_of(norms: Sequence["_Deferred"]) -> Tensor:
    """What norms have seen, one after the other, in double precision."""
    return torch.cat([number.cpu() for norm in norms for number in norm.numbers()])


def _take(norms: Sequence["_Deferred"], rows: Sequence[Tensor]) -> None:
    """Let norms have seen what all rows say."""
    widths = [width for norm in norms for width in (1, norm.num_features, norm.num_features)]
    for norm in norms:
        norm.part = None
    for row in rows:
        numbers = torch.split(row, widths)
        for norm, count, mean, squares in zip(norms, numbers[::3], numbers[1::3], numbers[2::3]):
            norm.add((count, mean, squares) if count.item() else None)


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

    def numbers(self) -> list[Tensor]:
        """The part as vectors in double precision; zeros where there is none."""
        if self.part is None:
            return [torch.zeros(width, dtype=torch.float64) for width in (1, self.num_features, self.num_features)]
        return [number.detach().double().reshape(-1) for number in self.part]

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
            remembered.lerp_(new.to(remembered), factor or 0.0)


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
