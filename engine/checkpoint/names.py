"""Checkpoint, names: what a parameter is called in the whole model, however that is cut into stages."""

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from torch import nn

# (stage, name in its module) -> name in the whole model.
GlobalName: TypeAlias = Callable[[int, str], str]

# What torch.compile puts in front of the names in what it has compiled.
_COMPILED: Final = "_orig_mod."


class Names:
    """Names in the whole model, of what this rank's stages hold.

    A name comes from the function that was given; else from the module's own ``global_name(name)``, if it has such a
    method; else it has the stage in front, such as ``stage2.layer.weight``, and then a checkpoint belongs to this very
    cut. That ``torch.compile`` has wrapped a module, or a part of one, makes no difference.

    Args:
        modules: by stage.
        global_name: the function.

    Raises:
        ValueError: two parameters or buffers would have one name.
    """

    def __init__(self, modules: Mapping[int, nn.Module], global_name: GlobalName | None = None) -> None:
        self._modules = modules
        self._global_name = global_name
        owner: dict[str, tuple[int, str]] = {}
        for stage, module in modules.items():
            for name in module.state_dict():
                known = owner.setdefault(self.of(stage, name), (stage, name))
                if known != (stage, name):
                    raise ValueError(
                        f"{known[1]} of stage {known[0]} and {name} of stage {stage} would both be called "
                        f"{self.of(stage, name)!r}: give global_name=… a function of stage and name that tells them "
                        "apart"
                    )

    def of(self, stage: int, name: str) -> str:
        """The name in the whole model of what a stage has under a name."""
        plain = name.replace(_COMPILED, "")
        if self._global_name is not None:
            return self._global_name(stage, plain)
        of_module = getattr(self._modules[stage], "global_name", None)
        return of_module(plain) if callable(of_module) else f"stage{stage}.{plain}"

    def aliases(self, stage: int) -> dict[str, str]:
        """Further names of a stage's parameters -> the first name of the same parameter."""
        first: dict[nn.Parameter, str] = {}
        aliases = {}
        for name, parameter in self._modules[stage].named_parameters(remove_duplicate=False):
            other = first.setdefault(parameter, name)
            if other != name:
                aliases[self.of(stage, name)] = self.of(stage, other)
        return aliases
