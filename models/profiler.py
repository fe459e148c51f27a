"""Measuring what each part of a model costs, one part in memory at a time."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from stagewright.models.build import CuttableModel, count_parameters
from stagewright.models.cut import Part
from stagewright.models.initialise import drawing_from
from stagewright.models.profile import PartProfile, Profile

# (output, target) -> scalar, or (sum, count)
LossFunction: TypeAlias = Callable[[Any, Any], Any]


def measure_profile(
    model: CuttableModel,
    inputs: Any,
    target: Any,
    loss_fn: LossFunction,
    *,
    num_rounds: int = 5,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Profile:
    """Run every part of a model on one microbatch, and take the time.

    Each part gets what the one before it returned; the loss belongs to the last. Durations are the shortest of
    `num_rounds`, for whatever else a machine does only adds to them. torch's global random state, the inputs, and the
    buffers of a model that is measured as it stands, such as the statistics of a batch norm, are untouched.

    Args:
        model: what is measured.
        inputs: of a microbatch, any nesting of tensors, all with one row a sample.
        target, loss_fn: as for a `Pipeline`.
        num_rounds: after one that is not counted.
        seed, device, dtype: as for `build_stage`.
    """
    device = torch.device(device)
    value, target = (tree_map_only(Tensor, partial(Tensor.to, device=device), given) for given in (inputs, target))
    num_rows = next(len(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    profiles = []
    with drawing_from(seed):
        for index, part in enumerate(model.parts):
            module = model.build(range(index, index + 1), seed=seed, device=device, dtype=dtype)
            is_last = index == len(model.parts) - 1
            arrived = value if index == 0 else tree_map_only(Tensor, differentiable, value)
            trial = Trial(module, arrived, partial(loss_of, loss_fn, target) if is_last else None)
            profile, value = _measured(part, trial, num_rounds)
            profiles.append(profile)
            del module, trial
    dtypes = {str(leaf.dtype).removeprefix("torch.") for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}
    return Profile(tuple(profiles), num_rows, ", ".join(sorted(dtypes)), device.type)


def _measured(part: Part, trial: "Trial", num_rounds: int) -> tuple[PartProfile, Any]:
    """What one part costs, and what it returns."""
    module = trial.module
    with unchanged_buffers(module):
        rounds = [trial.round() for _ in range(num_rounds + 1)][1:]
        value, saved = trial.output()
    forward, backward, input_gradient = map(min, zip(*rounds))
    input_gradient = min(input_gradient, backward) if trial.has_weights else backward
    profile = PartProfile(
        name=part.name,
        kind=part.kind,
        forward=forward,
        backward=backward,
        input_gradient=input_gradient,
        weight_gradient=backward - input_gradient,
        activation_bytes=saved,
        output_bytes=sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor)),
        num_parameters=count_parameters(module),
        parameter_bytes=sum(parameter.nbytes for parameter in module.parameters()),
    )
    return profile, value


class Trial:
    """A part on the input that it will have in a pipeline.

    Each run gets a copy of the input, which is no leaf: the part's first operation may work in place, as it may in a
    pipeline, and the next run finds the same numbers.

    Args:
        module: the part.
        value: what comes in, leaves of their graph.
        loss_fn: of its output, on the last part.
    """

    def __init__(self, module: nn.Module, value: Any, loss_fn: Callable[[Any], Any] | None) -> None:
        self.module = module
        self.value = value
        self.loss_fn = loss_fn
        self.leaves = [leaf for leaf in tree_leaves(self.value) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.weights = [parameter for parameter in module.parameters() if parameter.requires_grad]

    @property
    def has_weights(self) -> bool:
        """Whether a backward has a half that is not the input's gradient."""
        return bool(self.weights)

    def round(self) -> tuple[float, float, float]:
        """Seconds of a forward, of its full backward, and of an input gradient alone."""
        entered = self._enter()
        start = self._now()
        roots = self._roots(entered)
        forward = self._now() - start
        backward = self._gradient_seconds(roots, [*self.leaves, *self.weights])
        input_gradient = self._gradient_seconds(self._roots(self._enter()), self.leaves)
        return forward, backward, input_gradient

    def output(self) -> tuple[Any, int]:
        """What the part returns, without its loss, and the bytes that it keeps for its backward."""
        kept = Kept(
            {tensor.untyped_storage().data_ptr() for tensor in (*self.module.parameters(), *self.module.buffers())}
        )
        with saved_tensors_hooks(kept.pack, kept.unpack):
            output = self.module(self._enter())
            roots = None if self.loss_fn is None else self.loss_fn(output)
        del roots
        return tree_map_only(Tensor, Tensor.detach, output), sum(kept.sizes.values())

    def _enter(self) -> Any:
        """The input for one run."""
        return tree_map_only(Tensor, Tensor.clone, self.value)

    def _roots(self, entered: Any) -> list[Tensor]:
        output = self.module(entered)
        if self.loss_fn is not None:
            loss = self.loss_fn(output)
            output = loss[0] if isinstance(loss, tuple) else loss
        return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def _gradient_seconds(self, roots: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
        if not roots or not wanted:
            return 0.0
        gradients = [torch.ones_like(root) for root in roots]
        start = self._now()
        torch.autograd.grad(roots, wanted, gradients, allow_unused=True)
        return self._now() - start

    def _now(self) -> float:
        for device in {tensor.device for tensor in (*self.leaves, *self.weights) if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return time.perf_counter()


class Kept:
    """Counts what autograd saves, each memory once, weights not at all."""

    def __init__(self, own: set[int]) -> None:
        self.own = own
        self.sizes: dict[int, int] = {}
        self._tensors: list[Tensor] = []  # so that no address is used twice

    def pack(self, tensor: Tensor) -> Tensor:
        """Note a tensor that is saved."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.sizes[storage.data_ptr()] = storage.nbytes()
            self._tensors.append(tensor)
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        """Give it back."""
        return tensor


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Give a module's buffers back the values that they had, whatever happens meanwhile.

    Memory is saved, not tensors, so that buffers may overlap.
    """
    slots = [(owner, dict(owner._buffers)) for owner in module.modules()]
    storages = [buffer.untyped_storage() for buffer in module.buffers()]
    copies = [storage.clone() for storage in storages]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for storage, copy in zip(storages, copies, strict=True):
            storage.copy_(copy)
        for owner, buffers in slots:
            owner._buffers.clear()  # a forward may also have put other tensors in their place
            owner._buffers.update(buffers)


def loss_of(loss_fn: LossFunction, target: Any, output: Any) -> Any:
    """The loss of an output."""
    return loss_fn(output, target)


def differentiable(arrived: Tensor) -> Tensor:
    """A tensor as it arrives on a later stage: its gradient is wanted, where it can have one."""
    return arrived.requires_grad_(arrived.is_floating_point())
