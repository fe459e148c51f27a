"""Weights: what a stage computes with, in one or several versions, and what the optimizer trains of it."""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor, nn

LOW_PRECISION: Final = (torch.float16, torch.bfloat16)


class StageWeights(Protocol):
    """The weights of one stage."""

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """What the optimizer trains, by name."""
        ...

    @property
    def masters(self) -> Mapping[str, tuple[nn.Parameter, nn.Parameter]]:
        """By name, what the newest version computes with, and what the optimizer trains in its place."""
        ...

    def use(self, version: int | None) -> None:
        """Let the module compute with a version; the newest where None."""
        ...

    @property
    def delay(self) -> int:
        """Updates between the weights of the gradients that were brought last and those that they are applied to."""
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

    def clear(self) -> None:
        """Forget the gradients of a batch that has failed, but for those that have been brought."""
        ...

    def frozen_since(self) -> Sequence[str]:
        """What was trained when this was built, and is frozen now in some version but not in all that there are."""
        ...

    def older_versions(self) -> Mapping[int, Mapping[str, Tensor]]:
        """The values of those that are kept beside the newest one, by number."""
        ...

    def renumber(self, newest: int, older: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Go on from here as if what the module holds were the given version, and those before it these."""
        ...


class SingleWeights:
    """One version: the module's own parameters, or fp32 masters of those in low precision.

    Args:
        module: the stage.
        master: keep an fp32 copy of every fp16 or bf16 parameter; gradients are then added up in fp32, and the
            optimizer trains the copies (Micikevicius et al. 2018, section 3.1).
    """

    def __init__(self, module: nn.Module, *, master: bool = False) -> None:
        self.delay = 0
        self.trained: dict[str, nn.Parameter] = {}
        self.masters: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            self.trained[name] = parameter
            if master and parameter.dtype in LOW_PRECISION:
                self.trained[name] = master_of(parameter)
                self.masters[name] = (parameter, self.trained[name])

    def use(self, version: int | None) -> None:
        """There is one version."""

    def begin_backward(self, version: int, update: int) -> None:
        """Gradients go where autograd puts them."""

    def end_backward(self, version: int, update: int) -> None:
        """Add the gradients of low-precision parameters to those of their masters."""
        for parameter, master in self.masters.values():
            collect(parameter, master)

    def bring_gradients(self, update: int) -> None:
        """They are there already."""

    def begin_update(self, version: int) -> None:
        """The optimizer works in place."""

    def publish(self) -> None:
        """Round the masters to what the stage computes with."""
        with torch.no_grad():
            for parameter, master in self.masters.values():
                parameter.copy_(master)

    def clear(self) -> None:
        """Forget those of low-precision parameters, which the next microbatch would find."""
        for parameter, _ in self.masters.values():
            parameter.grad = None

    def frozen_since(self) -> Sequence[str]:
        """There is one version, which the trainer may freeze at will."""
        return ()

    def older_versions(self) -> Mapping[int, Mapping[str, Tensor]]:
        """There are none."""
        return {}

    def renumber(self, newest: int, older: Mapping[int, Mapping[str, Tensor]]) -> None:
        """There is one version, whatever its number."""


def like(parameter: nn.Parameter, data: Tensor, *, hooks: bool = False) -> nn.Parameter:
    """A parameter with other data in the place of one, with the attributes that its owner gave it.

    Args:
        parameter: in whose place.
        data: of the new one.
        hooks: also those on its gradient.
    """
    other = nn.Parameter(data)
    vars(other).update(vars(parameter))
    if hooks:
        for hook in (parameter._backward_hooks or {}).values():
            other.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            other.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return other


def master_of(parameter: nn.Parameter) -> nn.Parameter:
    """An fp32 copy."""
    return like(parameter, parameter.detach().float())


def collect(parameter: nn.Parameter, master: nn.Parameter) -> None:
    """Add a parameter's gradient to that of its master, in the master's precision."""
    if parameter.grad is None:
        return
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


def load_masters(weights: StageWeights, masters: Mapping[str, Tensor], stage: int) -> None:
    """Let a stage's masters take the values of a state, or where that has none, those of what the module has loaded.

    Raises:
        ValueError: the state belongs to other masters.
    """
    if masters and set(masters) != set(weights.masters):
        raise ValueError(
            f"stage {stage} keeps fp32 copies of {sorted(weights.masters)}: the state has those of {sorted(masters)}"
        )
    with torch.no_grad():
        for name, (parameter, master) in weights.masters.items():
            master.copy_(masters.get(name, parameter))
