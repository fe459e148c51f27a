"""Optimizers: one of the user's for all the parameters of a rank."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from stagewright.engine.weights import StageWeights

OptimizerFactory: TypeAlias = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]


def named_weights(weights: Mapping[int, StageWeights]) -> Iterable[tuple[str, nn.Parameter]]:
    """(name, trained parameter) of all stages; a name that occurs in two stages gets its stage in front."""
    seen: set[str] = set()
    for stage, of_stage in weights.items():
        for name, parameter in of_stage.trained.items():
            yield name if name not in seen else f"stage{stage}.{name}", parameter
            seen.add(name)


def make_optimizer(factory: OptimizerFactory | None, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer | None:
    """The optimizer of a rank; None where there is nothing to train.

    Raises:
        TypeError: the factory returns something else.
        ValueError: the optimizer calls for losses in its midst.
    """
    if factory is None or not named:
        return None
    optimizer = factory(named)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is called with (name, parameter) pairs and returns an Optimizer: got {optimizer!r}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS computes the loss anew within each step, and over the weights of all stages together: take an "
            "optimizer that needs the gradients alone"
        )
    return optimizer


class Planned:
    """Context: an optimizer has the settings that were noted for an update, and afterwards its own again.

    Args:
        optimizer: whose.
        settings: one dict a parameter group; None leaves all as it is.
    """

    def __init__(self, optimizer: Optimizer, settings: Sequence[Mapping[str, Any]] | None) -> None:
        self._groups = optimizer.param_groups
        self._settings = settings

    def __enter__(self) -> None:
        if self._settings is not None:
            own = [{key: group[key] for key in planned} for group, planned in zip(self._groups, self._settings)]
            self._apply(self._settings)
            self._settings = own

    def __exit__(self, *_: object) -> None:
        if self._settings is not None:
            self._apply(self._settings)

    def _apply(self, settings: Sequence[Mapping[str, Any]]) -> None:
        for group, planned in zip(self._groups, settings):
            group.update(planned)
