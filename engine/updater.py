"""Updater: the optimizer of a rank, stepped when the program says so."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from torch import nn
from torch.optim import Optimizer

OptimizerFactory: TypeAlias = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]


class Updater:
    """One optimizer for all the stages of a rank.

    The STEPs of a rank's stages stand together in a program; the optimizer runs once, at the last of them.

    Args:
        factory: makes the optimizer from (name, parameter) pairs; None where the trainer steps itself.
        parameters: of all stages of the rank; those without a gradient of their own are left out.
        stages: the stages of the rank.
    """

    def __init__(
        self, factory: OptimizerFactory | None, parameters: Sequence[tuple[str, nn.Parameter]], stages: Sequence[int]
    ) -> None:
        trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        self.optimizer = factory(trained) if factory is not None and trained else None
        self._num_stages = len(stages)
        self._num_due = 0

    def step(self) -> None:
        """One stage's gradient is complete; once all are, update the weights and drop the gradients."""
        self._num_due += 1
        if self._num_due == self._num_stages:
            self._num_due = 0
            if self.optimizer is not None:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
