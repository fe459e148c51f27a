"""Watch: which parameters of a module get a gradient in the meantime."""

from torch import Tensor, nn


class Watch:
    """Sees which parameters of a module get a gradient from now on."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = dict(module.named_parameters())
        self._before = {name: _state_of(parameter.grad) for name, parameter in self._parameters.items()}

    def grown(self) -> list[str]:
        """The names of those whose gradient has changed."""
        return [name for name, parameter in self._parameters.items() if _state_of(parameter.grad) != self._before[name]]


def _state_of(gradient: Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (id(gradient), gradient._version)
