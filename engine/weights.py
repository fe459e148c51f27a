"""Weights: what a stage computes with, in one or several versions, and what the optimizer trains of it."""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor, nn

_LOW_PRECISION: Final = (torch.float16, torch.bfloat16)


class StageWeights(Protocol):
    """The weights of one stage."""

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """What the optimizer trains, by name."""
        ...

    def use(self, version: int | None) -> None:
        """Let the module compute with a version; the newest where None."""
        ...

    def begin_backward(self, version: int, update: int) -> None:
        """Let the gradients of a version go to the sum that an update will apply."""
        ...

    def end_backward(self, version: int, update: int) -> None:
        """The gradients of one microbatch have been added."""
        ...

    def bring_gradients(self, update: int) -> None:
        """All gradients of an update are there: they become those of what is trained."""
        ...

    def begin_update(self, version: int) -> None:
        """Let the optimizer, which steps next, make a version of the newest one."""
        ...

    def publish(self) -> None:
        """The optimizer has made the newest version: let the stage compute with what is trained."""
        ...


class SingleWeights:
    """One version: the module's own parameters, or fp32 masters of those in low precision.

    Args:
        module: the stage.
        master: keep an fp32 copy of every fp16 or bf16 parameter; gradients are then added up in fp32, and the
            optimizer trains the copies (Micikevicius et al. 2018, section 3.1).
    """

    def __init__(self, module: nn.Module, *, master: bool = False) -> None:
        self.trained: dict[str, nn.Parameter] = {}
        self._masters: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            self.trained[name] = parameter
            if master and parameter.dtype in _LOW_PRECISION:
                self.trained[name] = nn.Parameter(parameter.detach().float())
                self._masters.append((parameter, self.trained[name]))

    def use(self, version: int | None) -> None:
        """There is one version."""

    def begin_backward(self, version: int, update: int) -> None:
        """Gradients go where autograd puts them."""

    def end_backward(self, version: int, update: int) -> None:
        """Add the gradients of low-precision parameters to those of their masters."""
        for parameter, master in self._masters:
            collect(parameter, master)

    def bring_gradients(self, update: int) -> None:
        """They are there already."""

    def begin_update(self, version: int) -> None:
        """The optimizer works in place."""

    def publish(self) -> None:
        """Round the masters to what the stage computes with."""
        with torch.no_grad():
            for parameter, master in self._masters:
                parameter.copy_(master)


class VersionedWeights:
    """Several versions, each with leaf parameters of its own over a flat buffer of its own, one a dtype.

    Before each forward and backward the version's parameters are put into the module's slots: a recomputation reads
    them too, and autograd's version counter guards the buffers. All versions share one gradient an update.

    Args:
        module: the stage; frozen parameters and buffers have one version.
        num_versions: how many are kept.
        master: as for ``SingleWeights``.

    Raises:
        ValueError: a parameter is no plain one, such as that of a sharded module.
    """

    def __init__(self, module: nn.Module, num_versions: int, *, master: bool = False) -> None:
        self._slots = _slots_of(module)
        parameters = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        for name, parameter in parameters.items():
            if type(parameter) is not nn.Parameter:
                raise ValueError(
                    f"weights are kept in {num_versions} versions, which needs plain parameters: {name} is a "
                    f"{type(parameter).__name__}; shard it under a synchronous schedule"
                )
        self._versions = [self._copy(parameters) for _ in range(num_versions)]
        self.trained = {name: self._trained(parameter, master) for name, parameter in self._versions[0].items()}
        self._has_masters = {name: self.trained[name].dtype != parameters[name].dtype for name in parameters}
        self._gradients: dict[int, dict[str, Tensor]] = {}
        self.newest = 0
        self.use(0)

    def use(self, version: int | None) -> None:
        """Put a version's parameters into the module's slots."""
        parameters = self._of(self.newest if version is None else version)
        for holder, slot, name in self._slots:
            holder[slot] = parameters[name]

    def begin_backward(self, version: int, update: int) -> None:
        """Lend the version's parameters the sum of gradients to which autograd shall add."""
        self.use(version)
        gradients = self._gradients.setdefault(update, {})
        for name, parameter in self._of(version).items():
            if not self._has_masters[name]:
                parameter.grad = gradients.get(name)

    def end_backward(self, version: int, update: int) -> None:
        """Take the sum back."""
        gradients = self._gradients[update]
        for name, parameter in self._of(version).items():
            if parameter.grad is None:
                continue
            if not self._has_masters[name]:
                gradients[name] = parameter.grad
            elif name in gradients:
                gradients[name].add_(parameter.grad)
            else:
                gradients[name] = parameter.grad.float()
            parameter.grad = None

    def bring_gradients(self, update: int) -> None:
        """Give the optimizer's parameters the gradients of an update."""
        for name, gradient in self._gradients.pop(update, {}).items():
            self.trained[name].grad = gradient

    def begin_update(self, version: int) -> None:
        """Copy the newest version into the buffer that is free, and let the optimizer train that."""
        free = self._of(version)
        with torch.no_grad():
            for name, parameter in self._of(self.newest).items():
                if not self._has_masters[name]:
                    free[name].copy_(parameter)
                    self.trained[name].data = free[name].data
        self.newest = version

    def publish(self) -> None:
        """Round the masters into the newest version."""
        with torch.no_grad():
            for name, parameter in self._of(self.newest).items():
                if self._has_masters[name]:
                    parameter.copy_(self.trained[name])

    def _of(self, version: int) -> dict[str, nn.Parameter]:
        return self._versions[version % len(self._versions)]

    @staticmethod
    def _copy(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Parameters of the same values over flat buffers of their own."""
        copies: dict[str, nn.Parameter] = {}
        for dtype in {parameter.dtype for parameter in parameters.values()}:
            chosen = {name: parameter for name, parameter in parameters.items() if parameter.dtype == dtype}
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in chosen.values()])
            parts = torch.split(flat, [parameter.numel() for parameter in chosen.values()])
            for (name, parameter), part in zip(chosen.items(), parts):
                copies[name] = nn.Parameter(part.view(parameter.shape))
        return {name: copies[name] for name in parameters}

    @staticmethod
    def _trained(parameter: nn.Parameter, master: bool) -> nn.Parameter:
        if master and parameter.dtype in _LOW_PRECISION:
            return nn.Parameter(parameter.detach().float())
        trained = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
        trained.data = parameter.data
        return trained


def collect(parameter: nn.Parameter, master: nn.Parameter) -> None:
    """Add a parameter's gradient to that of its master, in the master's precision."""
    if parameter.grad is None:
        return
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


def _slots_of(module: nn.Module) -> Sequence[tuple[dict[str, nn.Parameter | None], str, str]]:
    """Where the trained parameters of a module are looked up: the dict, the key there, and the parameter's name.

    A parameter that several submodules share has several slots and one name.
    """
    name_of = {parameter: name for name, parameter in module.named_parameters()}
    return [
        (submodule._parameters, slot, name_of[parameter])
        for submodule in module.modules()
        for slot, parameter in submodule._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
