"""Sharing: which parameters of a rank's stages are one weight, before anything trains them.

Within one stage a weight is one parameter, under whatever names. Every stage has parameters of its own: the stages of
a rank may lie anywhere in the model, and only one that owns its gradient can say when that is complete.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from stagewright.engine.locals import is_spread
from stagewright.engine.updates.weights import like

# Names of parameters that are one weight; "stage2.weight" is the one of that stage alone.
Group = Sequence[str]


def settle_sharing(modules: Mapping[int, nn.Module], groups: Sequence[Group]) -> None:
    """Make one parameter of the tied ones within a stage, and several of one that is shared by stages.

    Args:
        modules: this rank's, by stage.
        groups: what is declared as tied.

    Raises:
        ValueError: stages share a trained parameter without it being declared, or a name is in two groups.
    """
    names = [name for group in groups for name in group]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"a tied weight is in one group, with all its other names: {name!r} is there twice")
    for stage, module in modules.items():
        for group in groups:
            _tie_within(stage, module, group)
    owners: dict[nn.Parameter, tuple[int, str]] = {}
    for stage, module in modules.items():
        for name, parameter in list(module.named_parameters()):
            owner, first_name = owners.setdefault(parameter, (stage, name))
            if owner == stage or not parameter.requires_grad:
                continue
            if not any(members(group, owner, [first_name]) and members(group, stage, [name]) for group in groups):
                raise ValueError(
                    f"stages {owner} and {stage} share a parameter, {first_name!r} there and {name!r} here, but stages "
                    f"are trained each by itself: give the Pipeline tied=[[{first_name!r}, {name!r}]]"
                )
            _replace(module, parameter, like(parameter, parameter.detach().clone(), hooks=True))


def members(group: Group, stage: int, names: Iterable[str]) -> list[str]:
    """Those of a stage's parameter names that a group has."""
    return [name for name in names if name in group or f"stage{stage}.{name}" in group]


def kind_of(parameter: nn.Parameter) -> str:
    """In what tied weights are all alike, such as ``trained float32[11, 6]``."""
    kind = f"{'trained' if parameter.requires_grad else 'frozen'} {parameter.dtype}{list(parameter.shape)}"
    kind += f" {parameter.placements}" if is_spread(parameter) else ""
    return kind.replace("torch.", "")


def all_names(module: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the first name of the same parameter."""
    first = {parameter: name for name, parameter in module.named_parameters()}
    return {name: first[parameter] for name, parameter in module.named_parameters(remove_duplicate=False)}


def _tie_within(stage: int, module: nn.Module, group: Group) -> None:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names = members(group, stage, parameters)
    for name in names[1:]:
        one, other = parameters[names[0]], parameters[name]
        if kind_of(one) != kind_of(other):
            raise ValueError(
                f"tied weights have one shape and type, and all are trained or none: got {names[0]} of stage {stage}: "
                f"{kind_of(one)}, {name} of stage {stage}: {kind_of(other)}"
            )
        _replace(module, other, one)


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put another parameter wherever a module has this one."""
    for submodule in module.modules():
        for slot, parameter in submodule._parameters.items():
            if parameter is old:
                submodule._parameters[slot] = new
