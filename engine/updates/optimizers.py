"""Optimizers: one of the user's for all the parameters of a rank."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stagewright.engine.updates.weights import StageWeights

OptimizerFactory: TypeAlias = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]


def named_weights(weights: Mapping[int, StageWeights]) -> Iterable[tuple[str, nn.Parameter]]:
    """(name, trained parameter) of all stages; a name that occurs in several stages gets its stage in front in each."""
    times = Counter(name for of_stage in weights.values() for name in of_stage.trained)
    for stage, of_stage in weights.items():
        for name, parameter in of_stage.trained.items():
            own = f"stage{stage}.{name}"
            yield name if times[name] == 1 and own not in times else own, parameter


class NothingToTrain(Optimizer):
    """The optimizer of a rank without parameters, so that schedulers of the learning rate run on every rank alike."""

    def __init__(self) -> None:
        placeholder = nn.Parameter(torch.empty(0))
        super().__init__([placeholder], {"lr": 0.0, "momentum": 0.0, "betas": (0.0, 0.0)})
        self.param_groups[0]["params"] = []

    def step(self, closure: Any = None) -> Any:
        """Nothing is to be done."""


def make_optimizer(factory: OptimizerFactory | None, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer | None:
    """The optimizer of a rank; None where the trainer steps by itself.

    Raises:
        TypeError: the factory returns something else.
        ValueError: the optimizer calls for losses in its midst.
    """
    if factory is None:
        return None
    if not named:
        return NothingToTrain()
    optimizer = factory(named)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is called with (name, parameter) pairs and returns an Optimizer: got {optimizer!r}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS computes the loss anew within each step, and over the weights of all stages together: take an "
            "optimizer that needs the gradients alone"
        )
    return optimizer


class Plans:
    """The settings of an optimizer, such as learning rates, as they were when the batch of an update was given.

    Settings that the optimizer changes itself, as some count their steps among them, are left to it.

    Args:
        optimizer: whose.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._noted: dict[int, list[dict[str, Any]]] = {}
        self._own: set[str] = {"params"}

    def note(self, updates: Iterable[int]) -> None:
        """Note the settings of now for updates that are made later."""
        settings = [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
            for group in self._optimizer.param_groups
        ]
        self._noted.update(dict.fromkeys(updates, settings))
        # A scheduler that goes on before the update is made need not warn: its rate is the one noted.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def clear(self) -> None:
        """Forget what was noted."""
        self._noted.clear()

    @contextmanager
    def of(self, update: int) -> Iterator[None]:
        """Context: the optimizer has the settings of an update, and afterwards those that it had before."""
        groups = self._optimizer.param_groups
        before = [dict(group) for group in groups]
        for group, noted in zip(groups, self._noted.pop(update, [])):
            group.update({key: value for key, value in noted.items() if key in group and key not in self._own})
        planned = [dict(group) for group in groups]
        try:
            yield
        finally:
            for group, during, earlier in zip(groups, planned, before):
                self._own.update(key for key, value in during.items() if not _is_same(group.get(key), value))
                group.update({key: value for key, value in earlier.items() if key not in self._own})


def _is_same(one: Any, other: Any) -> bool:
    """Whether a setting was left alone."""
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other))
