"""Treatments: what remedies against staleness do to one rank's updates, and what they must remember for it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer


class Treatment:
    """A remedy at work on one rank; each hook leaves things as they are unless a subclass says otherwise.

    An update calls ``rate``, ``before``, the optimizer, ``after``; then ``ahead`` with each parameter, where the
    treatment extrapolates. Its delay is the number of updates that were made since the weights of its gradients.
    """

    extrapolates: bool = False

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that the remedy cannot serve."""

    def rate(self, delay: int) -> float:
        """By what to multiply the learning rates of an update."""
        return 1.0

    def before(self, optimizer: Optimizer, delay: int) -> None:
        """The optimizer is about to step."""

    def after(self, optimizer: Optimizer, delay: int) -> None:
        """The optimizer has stepped."""

    def ahead(self, parameter: nn.Parameter) -> Tensor | None:
        """By what those who compute with the newest version find a parameter moved; None for not at all."""
        return None

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """What must be kept to go on later, parameters numbered as the optimizer has them."""
        return {}

    def load_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``."""


class Discounting(Treatment):
    """Divides learning rates by (1 + delay) ** p, where p falls from ``power`` to 0 over ``num_updates``."""

    def __init__(self, num_updates: int, power: float) -> None:
        self._num_updates = num_updates
        self._power = power
        self._num_made = 0

    def rate(self, delay: int) -> float:
        """1 without delay, and at the end."""
        power = self._power * (1 - min(self._num_made / self._num_updates, 1.0))
        return float((1 + delay) ** -power)

    def after(self, optimizer: Optimizer, delay: int) -> None:
        """Count."""
        self._num_made += 1

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """How many updates there were."""
        return {"num_made": self._num_made}

    def load_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Count on."""
        self._num_made = state["num_made"]


class Predicting(Treatment):
    """Moves versions by so many times the velocity in the optimizer's state."""

    extrapolates = True

    def __init__(self, num_times: float) -> None:
        self._num_times = num_times
        self._optimizer: Optimizer
        self._settings: dict[nn.Parameter, Mapping[str, Any]] = {}

    def check(self, optimizer: Optimizer) -> None:
        """SGD with momentum, Adam and what derives from them keep a velocity of known meaning."""
        keeps = isinstance(optimizer, Adam) or (
            isinstance(optimizer, SGD) and all(group["momentum"] for group in optimizer.param_groups)
        )
        if not keeps:
            raise ValueError(
                "WeightPrediction knows the velocity that SGD with momentum, Adam and AdamW keep: got "
                f"{type(optimizer).__name__}{' without momentum' if isinstance(optimizer, SGD) else ''}; take "
                "DiscrepancyCorrection, which serves any optimizer"
            )

    def after(self, optimizer: Optimizer, delay: int) -> None:
        """Note the settings of the update; those that the trainer has made meanwhile are for later ones."""
        kept = ("lr", "betas", "eps", "amsgrad", "maximize")
        settings = [{key: group[key] for key in kept if key in group} for group in optimizer.param_groups]
        self.load_state_dict(optimizer, {"settings": settings})

    def ahead(self, parameter: nn.Parameter) -> Tensor | None:
        """The velocity of the last update, as many times as there are updates to come."""
        settings = self._settings.get(parameter)
        state = self._optimizer.state.get(parameter) if settings is not None else None
        if settings is None or not state:
            return None
        rate = settings["lr"] if settings["maximize"] else -settings["lr"]
        return _direction(state, settings).mul(self._num_times * rate)

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The settings of the last update, group by group."""
        firsts = [group["params"][0] if group["params"] else None for group in optimizer.param_groups]
        return {"settings": [{} if first is None else self._settings.get(first, {}) for first in firsts]}

    def load_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Go on from them."""
        self._optimizer = optimizer
        for group, settings in zip(optimizer.param_groups, state["settings"]):
            if settings:
                self._settings.update(dict.fromkeys(group["params"], settings))


class Moving(Treatment):
    """Moves versions by so many times the mean movement of the weights, of which an update leaves ``kept``."""

    extrapolates = True

    def __init__(self, num_times: int, kept: float) -> None:
        self._num_times = num_times
        self._kept = kept
        self._before: dict[nn.Parameter, Tensor] = {}
        self._movement: dict[nn.Parameter, Tensor] = {}

    def before(self, optimizer: Optimizer, delay: int) -> None:
        """Note where the weights are."""
        if self._num_times:
            self._before = _copies(optimizer)

    def after(self, optimizer: Optimizer, delay: int) -> None:
        """Let the update count in the mean; at first there was no movement."""
        for parameter, before in self._before.items():
            change = parameter.detach() - before
            movement = self._movement.setdefault(parameter, torch.zeros_like(change))
            movement.lerp_(change, 1 - self._kept)
        self._before = {}

    def ahead(self, parameter: nn.Parameter) -> Tensor | None:
        """The mean movement, as many times as there are updates to come."""
        movement = self._movement.get(parameter)
        return None if movement is None else movement * self._num_times

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The mean movement."""
        return {"movement": _by_number(optimizer, self._movement)}

    def load_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Go on from it."""
        self._movement = _by_parameter(optimizer, state["movement"])


class Feeding(Treatment):
    """Adds to each update so much of the error of the one before."""

    def __init__(self, strength: float) -> None:
        self._strength = strength
        self._before: dict[nn.Parameter, Tensor] = {}
        self._last: dict[nn.Parameter, Tensor] = {}  # changes made by the last update, if it was late

    def before(self, optimizer: Optimizer, delay: int) -> None:
        """Note where the weights are."""
        self._before = _copies(optimizer) if delay else {}

    @torch.no_grad()
    def after(self, optimizer: Optimizer, delay: int) -> None:
        """Put the error right that is known now, and remember what the optimizer did."""
        last, self._last = self._last, {}
        for parameter, before in self._before.items():
            change = parameter.detach() - before
            self._last[parameter] = change
            if parameter in last:
                parameter.add_(change - last[parameter], alpha=self._strength)
        self._before = {}

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """What the optimizer did last."""
        return {"last": _by_number(optimizer, self._last)}

    def load_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Go on from it."""
        self._last = _by_parameter(optimizer, state["last"])


def _direction(state: Mapping[str, Any], settings: Mapping[str, Any]) -> Tensor:
    """Along which the optimizer has moved a parameter, without the learning rate: SGD's momentum, or Adam's ratio."""
    if "momentum_buffer" in state:
        momentum: Tensor = state["momentum_buffer"]
        return momentum
    beta1, beta2 = settings["betas"]
    num_updates = float(state["step"])
    squares = state["max_exp_avg_sq" if settings["amsgrad"] else "exp_avg_sq"] / (1 - beta2**num_updates)
    ratio: Tensor = state["exp_avg"] / (1 - beta1**num_updates) / (squares.sqrt() + settings["eps"])
    return ratio


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _copies(optimizer: Optimizer) -> dict[nn.Parameter, Tensor]:
    return {parameter: parameter.detach().clone() for parameter in _parameters(optimizer)}


def _by_number(optimizer: Optimizer, tensors: Mapping[nn.Parameter, Tensor]) -> dict[int, Tensor]:
    numbered = enumerate(_parameters(optimizer))
    return {number: tensors[parameter] for number, parameter in numbered if parameter in tensors}


def _by_parameter(optimizer: Optimizer, tensors: Mapping[int, Tensor]) -> dict[nn.Parameter, Tensor]:
    parameters = _parameters(optimizer)
    return {parameters[number]: tensor.to(parameters[number]) for number, tensor in tensors.items()}
