"""Stage: one piece of the model with the stash of its microbatches in flight."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from stagewright.engine.stages.batchnorm import Untouched, remembering
from stagewright.engine.stages.boundary import Boundary
from stagewright.engine.stages.deferral import Deferred, Deferring
from stagewright.engine.stages.randomness import Seeds
from stagewright.engine.stages.watch import Watch
from stagewright.engine.updates.weights import SingleWeights, StageWeights
from stagewright.engine.value import Layout, Packed, Skeleton, Value, check_crossing, pack, pack_gradients, unpack

logger = logging.getLogger(__name__)

# One entry a tensor that a gradient comes back for; None where nothing depended on it.
Gradients: TypeAlias = Sequence[Tensor | None]


class Stashed:
    """What the backward of a microbatch needs of its forward.

    Args:
        boundary: what the stage received, and where the input gradients arrive.
        deferred: the weight gradients that the input gradient leaves for later; None under full backward.
    """

    __slots__ = ("boundary", "deferred", "gradients", "roots")

    def __init__(self, boundary: Boundary, deferred: Deferred | None) -> None:
        self.boundary = boundary
        self.deferred = deferred
        # Where the backward starts. The graph's edges are kept and not the outputs themselves, so that an output
        # which was sent is released unless an operation of the stage needs it.
        self.roots: list[GradientEdge] = []
        self.gradients: Gradients | None = None


class Stage:
    """One stage of the model on its rank.

    Args:
        index: the stage.
        module: any module; takes what the stage before it returned, and the first one the user's input.
        seeds: gives the random numbers of each forward.
        weights: of the module; its own parameters where left out.
        splits_backward: whether backwards come in two halves, I and W.
        num_kept: the last so many microbatches of a batch keep their activations, all others are computed again in
            their backward; None keeps all.
        autocast: the dtype in which forwards compute what can be computed in low precision.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        seeds: Seeds,
        *,
        weights: StageWeights | None = None,
        splits_backward: bool = False,
        num_kept: int | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.index = index
        self.module = module
        self.stash: dict[int, Stashed] = {}
        self.seeds = seeds
        self.weights = weights or SingleWeights(module)
        self.autocast = autocast
        self.norms = remembering(module)
        self.seed_microbatch: Callable[[int], None] | None = getattr(module, "seed_microbatch", None)
        self._name = f"stage {index}"
        self._handed_on: Layout | None = None
        self._handed_back: Layout | None = None
        self._splits_backward = splits_backward
        self._num_kept = num_kept
        self._pending: dict[int, Deferred] = {}
        self._has_told = False
        self._anchor = torch.empty(0, requires_grad=True)
        self._frozen = [(name, weight) for name, weight in module.named_parameters() if not weight.requires_grad]

    def check_frozen(self) -> None:
        """Refuse to train what was frozen when the pipeline was built: no sum, division or norm knows of it.

        Raises:
            ValueError: such a parameter wants a gradient now; or one version of a weight is frozen.
        """
        for name in self.weights.frozen_since():
            raise ValueError(
                f"{name} of stage {self.index} is frozen now, but only in the version of it that the module happened "
                "to hold: under an asynchronous schedule freeze before the Pipeline is built"
            )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"{name} of stage {self.index} was frozen when the Pipeline was built, and wants a gradient now: "
                    "build it with all that will ever be trained, and freeze afterwards, or build another Pipeline"
                )

    def forward(
        self,
        microbatch: int,
        moment: tuple[int, int],
        received: Packed,
        keywords: Mapping[str, Value],
        num_left: int,
    ) -> Value:
        """y = stage(x); stash x and y.

        Args:
            microbatch: under this number it is stashed.
            moment: the step and the microbatch within its batch, for the random numbers.
            received: x.
            keywords: further arguments of the module.
            num_left: microbatches of the batch that this stage has not begun.
        """
        body = _Body(self, moment, received.layout.skeleton, keywords)
        if not torch.is_grad_enabled():
            return body(*received.tensors)
        differentiable = received.layout.differentiable
        wanted_ones = [tensor for tensor, wanted in zip(received.tensors, differentiable) if wanted]
        boundary = Boundary(wanted_ones, self._anchor)
        stashed = Stashed(boundary, Deferred() if self._splits_backward else None)
        self.stash[microbatch] = stashed
        entered = iter(boundary.enter())
        tensors = [next(entered) if wanted else tensor for tensor, wanted in zip(received.tensors, differentiable)]
        with _deferring(stashed.deferred):
            if self._num_kept is None or num_left < self._num_kept:
                return body(*tensors)
            repeatable = partial(body.on_copies, stashed.deferred)
            return checkpoint(repeatable, *tensors, use_reentrant=False, preserve_rng_state=False)

    def autocasting(self) -> AbstractContextManager[object]:
        """What forward and loss are computed in."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.seeds.device.type, self.autocast)

    def hand_on(self, microbatch: int, output: Value) -> Packed:
        """Stash where the backward will start, and give what goes to the next stage."""
        packed = pack(output, self._name, known=self._handed_on)
        self._handed_on = packed.layout
        check_crossing(packed, self._name)
        if torch.is_grad_enabled():
            self.stash[microbatch].roots = [_edge(tensor) for tensor in packed.tensors if tensor.requires_grad]
        return packed

    def hand_back(self, gradients: Gradients) -> Packed:
        """Give what goes to the stage before."""
        packed = pack_gradients(gradients, self._handed_back)
        self._handed_back = packed.layout
        return packed

    def end_with(self, microbatch: int, loss: Tensor, gradient: float) -> None:
        """Stash the loss as the place where the backward starts, and the gradient to start with."""
        if torch.is_grad_enabled():
            stashed = self.stash[microbatch]
            stashed.gradients = [_filled_like(loss, gradient)] if loss.requires_grad else []
            stashed.roots = [_edge(loss)] if loss.requires_grad else []

    def backward(self, microbatch: int, gradients: Gradients | None, version: int = 0, update: int = 0) -> Gradients:
        """dx, dw = gradients of the stash at dy; weights.grad += dw; drop the stash."""
        passed_back = self.input_gradient(microbatch, gradients, version, update)
        self.weight_gradient(microbatch, version, update)
        return passed_back

    def input_gradient(
        self, microbatch: int, gradients: Gradients | None, version: int = 0, update: int = 0
    ) -> Gradients:
        """dx = gradient of the stash at dy; keep what dw needs.

        Args:
            microbatch: whose.
            gradients: dy; None on the last stage, which starts from its loss.
            version: of the weights that the forward used.
            update: the one that the weight gradients go into.
        """
        stashed = self.stash.pop(microbatch)
        self.weights.begin_backward(version, update)
        gradients = stashed.gradients if gradients is None else gradients
        assert gradients is not None, "the last stage has a loss, every other one gets gradients"
        assert len(gradients) == len(stashed.roots), "a gradient for every differentiable output"
        reached = [(root, dy) for root, dy in zip(stashed.roots, gradients) if dy is not None]
        deferred = stashed.deferred
        if reached:
            watch = Watch(self.module) if deferred is not None and not self._has_told else None
            with _deferring(deferred), deferred or nullcontext():
                _run_backward(*zip(*reached))
            if watch is not None:
                self._tell(watch.grown())
        if deferred is not None:
            self._pending[microbatch] = deferred
        self.weights.end_backward(version, update)
        return stashed.boundary.gradients

    def weight_gradient(self, microbatch: int, version: int = 0, update: int = 0) -> None:
        """weights.grad += dw from what the input gradient kept."""
        deferred = self._pending.pop(microbatch, None)
        if deferred is not None:
            self.weights.begin_backward(version, update)
            deferred.finish()
            self.weights.end_backward(version, update)

    def _tell(self, names: Sequence[str]) -> None:
        """Say once which weight gradients do not wait for W."""
        self._has_told = True
        if names:
            logger.info(
                "stage %d: the weight gradients of %s cannot be put off, so they come with the input gradient",
                self.index,
                ", ".join(names),
            )

    def clear(self) -> None:
        """Drop whatever is in flight, after a failure."""
        self.stash.clear()
        self._pending.clear()


class _Body:
    """A stage's module on one microbatch; called twice where it is computed again, with the same random numbers."""

    def __init__(
        self, stage: Stage, moment: tuple[int, int], skeleton: Skeleton, keywords: Mapping[str, Value]
    ) -> None:
        self._stage = stage
        self._moment = moment
        self._skeleton = skeleton
        self._keywords = keywords
        self._remembering: Sequence[_NormBase] = ()  # norms that have learned of this microbatch

    def __call__(self, *tensors: Tensor) -> Value:
        number = self._stage.seeds.plant(*self._moment, self._stage.index)
        if self._stage.seed_microbatch is not None:
            self._stage.seed_microbatch(number)
        value = unpack(self._skeleton, tensors)
        norms, self._remembering = self._remembering, self._stage.norms
        with self._stage.autocasting(), Untouched(norms):
            return self._stage.module(value, **self._keywords)

    def on_copies(self, deferred: Deferred | None, *tensors: Tensor) -> Value:
        """The same where what the module changes in place must still be there the second time, in the backward."""
        with nullcontext() if deferred is None else deferred.paused():
            return self(*(tensor.clone() for tensor in tensors))


def _edge(tensor: Tensor) -> GradientEdge:
    """Where the gradient of a tensor enters its graph."""
    node = tensor.grad_fn
    return get_gradient_edge(tensor) if node is None else GradientEdge(node, tensor.output_nr)


def _run_backward(roots: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """What ``torch.autograd.backward`` does, without the checks that it makes in Python and autograd makes again."""
    _engine_run_backward(
        roots,
        gradients,
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _filled_like(loss: Tensor, gradient: float) -> Tensor:
    """The gradient to start with; one too large for the loss's type is an overflow like any other, and no error."""
    if gradient == 1.0 or loss.dtype is torch.float64:
        return torch.full_like(loss, gradient)
    return torch.full_like(loss, gradient, dtype=torch.float64).to(loss.dtype)


def _deferring(deferred: Deferred | None) -> AbstractContextManager[object]:
    return nullcontext() if deferred is None else Deferring(deferred)
