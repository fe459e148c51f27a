"""Updater: from a rank's complete gradients to its new weights, when the program says so."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from stagewright.engine.errors import NotFiniteError
from stagewright.engine.loss import BatchLoss
from stagewright.engine.plan import OnNan
from stagewright.engine.staleness import Remedies
from stagewright.engine.updates.agreement import Agreement, LossScale, Scalars
from stagewright.engine.updates.gradients import Gradients
from stagewright.engine.updates.optimizers import OptimizerFactory, Plans, make_optimizer
from stagewright.engine.updates.weights import StageWeights

logger = logging.getLogger(__name__)


class Updater:
    """One optimizer for all the stages of a rank.

    The STEPs of a rank's stages stand together in a program; the optimizer runs once, at the last of them.

    Args:
        factory: makes the optimizer from (name, parameter) pairs; None where the trainer steps itself.
        weights: of this rank's stages.
        gradients: of the same.
        agreement: takes what all ranks must know to the others.
        max_norm: the norm to which all gradients together are clipped.
        loss_scale: by which losses were multiplied.
        on_nan: what to do about a loss that is NaN or infinite; nobody looks where left out.
        remedies: against staleness.
    """

    def __init__(
        self,
        factory: OptimizerFactory | None,
        weights: Mapping[int, StageWeights],
        gradients: Gradients,
        agreement: Agreement,
        remedies: Remedies,
        *,
        max_norm: float | None = None,
        loss_scale: LossScale | None = None,
        on_nan: OnNan | None = None,
    ) -> None:
        named = [named for of_stage in weights.values() for named in of_stage.trained.items()]
        self.optimizer = make_optimizer(factory, named)
        if self.optimizer is not None:
            remedies.check(self.optimizer)
        self.can_step = factory is not None
        self.loss_scale = loss_scale
        self.overflowed = False
        self.skipped = False
        self.grad_norm: float | None = None
        self.loss_counts: bool | None = None  # unknown until the ranks have agreed once
        self._weights = weights
        self._gradients = gradients
        self._agreement = agreement
        self._remedies = remedies
        self._max_norm = max_norm
        self._on_nan = on_nan
        self._num_due = 0
        self._num_updates = 0
        self._heard: Scalars | None = None
        self._plans = None if self.optimizer is None else Plans(self.optimizer)
        # By update: its losses, by what they were multiplied, and the step that they are of.
        self._losses: dict[int, tuple[BatchLoss, float, int]] = {}

    @property
    def needs_scalars(self) -> bool:
        """Whether an update depends on what no rank knows alone; the first step finds out about the loss."""
        return self._measures or self._on_nan is not None or self.loss_counts is not False

    @property
    def _measures(self) -> bool:
        """Whether the norm is needed, or whether gradients overflow."""
        return self._max_norm is not None or self.loss_scale is not None

    @property
    def scale(self) -> float:
        """By what losses are multiplied before the backward."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def scale_of(self, update: int, loss: BatchLoss, step: int) -> float:
        """By what an update's losses are multiplied: all alike, whatever other updates change in between."""
        return self._losses.setdefault(update, (loss, self.scale, step))[1]

    def plan(self, updates: Iterable[int]) -> None:
        """Note the learning rates and other settings of now for updates that are made later."""
        if self._plans is not None:
            self._plans.note(updates)

    def begin(self) -> None:
        """A batch begins; its update is the first of its program."""
        self._num_due = self._num_updates = 0
        self._gradients.begin()

    def reduce(self, stage: int) -> None:
        """All gradients of a stage are there: start their sum over its copies."""
        self._weights[stage].bring_gradients(self._num_updates + 1)
        self._gradients.reduce(stage)

    def reduce_tied(self, stage: int) -> None:
        """All gradients of a tied stage are there: start their sum over the stages that share a weight with it."""
        self._weights[stage].bring_gradients(self._num_updates + 1)
        self._gradients.reduce_tied(stage)

    def tell(self) -> None:
        """All gradients of this rank are there: tell the other ranks what they must know of them."""
        update = self._num_updates + 1
        self._bring(update, counted=True)
        norms = self._gradients.measure() if self._measures else Scalars()
        if update not in self._losses:  # this rank has computed none
            self._agreement.tell(norms)
            return
        loss, scale, step = self._losses[update]
        means = loss.means()
        count = means.weight if means.counts else 0.0
        own = replace(norms, count=count, counts=means.counts, loss_scale=scale, step=step)
        fault = loss.first_fault() if self._on_nan is not None else None
        if fault is not None:
            own = replace(own, faulty=fault + 1, replica=self._agreement.replica)
        self._agreement.tell(own, watched=self._on_nan is not None)

    def is_due(self, version: int) -> bool:
        """One stage's gradient is complete; once all are, wait for what the update needs of other ranks."""
        self._num_due += 1
        if self._num_due < len(self._weights):
            return False
        self._num_due = 0
        self._num_updates = version
        self._bring(version)
        self._heard = self._agreement.hear()
        return True

    def step(self, version: int) -> None:
        """Make a weight version of the newest one and the gradients, and drop these; after an overflow both are one."""
        self._settle()
        self._losses.pop(version, None)
        for weights in self._weights.values():
            weights.begin_update(version)
        if self.optimizer is not None and self._plans is not None:
            with self._plans.of(version):
                self._optimize(self.optimizer)
        for weights in self._weights.values():
            weights.publish()
        self._gradients.drop()

    def _optimize(self, optimizer: Optimizer) -> None:
        """Clip and step, unless the gradients have overflowed or belong to a loss that is not finite."""
        if self.overflowed or self.skipped:
            return
        if self._max_norm is not None and self.grad_norm is not None:
            self._gradients.scale(clip_factor(self.grad_norm, self._max_norm))
        delay = max((weights.delay for weights in self._weights.values()), default=0)
        self._remedies.step(optimizer, delay)

    def finish_accumulating(self) -> None:
        """A batch without an update is through: its gradients join those of earlier ones, unless they overflow."""
        self._gradients.complete()
        self._heard = self._agreement.hear()
        self._settle()
        self._losses.clear()

    def clip(self, max_norm: float) -> float:
        """Clip all ranks' gradients together, and give the norm that they had; every rank calls this alike."""
        self._agreement.tell(self._gradients.measure())
        scalars = self._agreement.hear()
        assert scalars is not None, "what was told is heard"
        self.grad_norm = scalars.norm(1.0)
        self._gradients.scale(clip_factor(self.grad_norm, max_norm))
        return self.grad_norm

    def clear(self) -> None:
        """Forget a batch that has failed."""
        self._gradients.forget_batch()
        self._agreement.clear()
        self._heard = None
        self._losses.clear()
        if self._plans is not None:
            self._plans.clear()

    def resume(self, num_updates: int) -> None:
        """Go on with the update after so many."""
        self.clear()
        self._num_due, self._num_updates = 0, num_updates

    def _bring(self, update: int, *, counted: bool = False) -> None:
        for weights in self._weights.values():
            weights.bring_gradients(update)
        self._gradients.complete(counted=counted)

    def _settle(self) -> None:
        """Divide the new gradients by all they must be and add the earlier ones; drop the new ones if they overflow, or
        belong to a loss that is not finite.
        """
        scalars, self._heard = self._heard, None
        self.skipped = scalars is not None and self._is_skipped(scalars)
        if scalars is None:
            self._gradients.settle()
            return
        self.loss_counts = scalars.counts
        divisor = scalars.loss_scale * (scalars.count if scalars.counts else 1.0)
        factor = 1.0 / divisor if divisor else 0.0
        self.grad_norm = scalars.norm(factor) if self._measures else None
        self.overflowed = scalars.overflow and self.loss_scale is not None
        if self.loss_scale is not None:
            self.loss_scale.update(overflow=self.overflowed)
        if self.overflowed or self.skipped:
            self._gradients.discard()
        else:
            self._gradients.settle(factor)

    def _is_skipped(self, scalars: Scalars) -> bool:
        """Whether a loss is not finite; every rank hears the same.

        Raises:
            NotFiniteError: that was not to happen.
        """
        if not scalars.faulty:
            return False
        replica = f" of replica {scalars.replica}" if self._agreement.num_replicas > 1 else ""
        fault = f"the loss of microbatch {scalars.faulty - 1}{replica} is NaN or infinite (step {scalars.step})"
        if self._on_nan == "raise":
            raise NotFiniteError(f"{fault}; no rank has made this update: on_nan='skip' goes on without it")
        if self._agreement.rank == 0:
            logger.warning("%s: no rank makes this update", fault)
        return True

    def state_dict(self) -> dict[str, object]:
        """The optimizer's state, the loss scale, and what the remedies against staleness remember."""
        scale = None if self.loss_scale is None else (self.loss_scale.value, self.loss_scale.num_good_steps)
        if self.optimizer is None:
            return {"optimizer": None, "loss_scale": scale, "staleness": []}
        remembered = self._remedies.state_dict(self.optimizer)
        return {"optimizer": self.optimizer.state_dict(), "loss_scale": scale, "staleness": remembered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``."""
        optimizer, scale = state["optimizer"], state["loss_scale"]
        if self.optimizer is not None and isinstance(optimizer, dict):
            self.optimizer.load_state_dict(optimizer)
            self._remedies.load_state_dict(self.optimizer, state.get("staleness", []))
        if self.loss_scale is not None and isinstance(scale, tuple):
            self.loss_scale.value, self.loss_scale.num_good_steps = scale


def clip_factor(norm: float, max_norm: float) -> float:
    """By what to multiply gradients of a norm so that they have the wanted one at most, as torch does; of NaN NaN."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor
