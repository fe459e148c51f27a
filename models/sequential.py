"""Any `nn.Sequential` as a model that can be cut between its members."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from stagewright.models.chain import Chain
from stagewright.models.checks import shown
from stagewright.models.cut import Part
from stagewright.models.meta import loose_tensors


def cut_sequential(build: Callable[[], nn.Sequential]) -> Chain:
    """Make an `nn.Sequential` a chain: each member is a part, and no other stage's memory is ever taken.

    `build` is called under `torch.device("meta")`; the members of a stage are then made real, and filled by their own
    `reset_parameters` with random numbers of their own, from the seed and their names. Stages have the names of the
    whole model's state dict, `2.weight` whichever stage holds member 2. A `build` that returns modules with memory,
    such as `lambda: model` for a trained one, gives its very modules.

    Raises `TypeError` where `build` does not return an `nn.Sequential`, and `ValueError` for one whose members would
    not do the same in stages: it is empty, does more than to call them in turn, has a member twice, or members that
    share a tensor; and, when a stage is built, for a module with tensors that its `reset_parameters` does not fill.
    """
    if not callable(build) or isinstance(build, nn.Module):
        raise TypeError(f"cut_sequential takes what builds a Sequential: got {shown(build)}; pass lambda: model")
    with torch.device("meta"):
        model = build()
    check_plain(model)
    members = dict(model.named_children())
    if len(model) != len(members):
        raise ValueError(
            f"members of a Sequential may be cut apart: got {len(model)} members of which only {len(members)} are "
            f"distinct; make each a module of its own, or put those that share into a Sequential that is one member"
        )
    check_unshared(members)
    return Chain(tuple(map(Part, members)), _Members(build))


class _Members:
    """The members of a Sequential, by name."""

    def __init__(self, build: Callable[[], nn.Sequential]) -> None:
        self._build = build

    def __call__(self) -> Mapping[str, nn.Module]:
        return dict(self._build().named_children())


def check_plain(model: nn.Module) -> None:
    """Raise where a model is something else than its members, called in turn."""
    if not isinstance(model, nn.Sequential):
        raise TypeError(
            f"only an nn.Sequential says in which order its members are called: got {type(model).__name__}; "
            "return nn.Sequential(*members)"
        )
    name = type(model).__name__
    if not len(model):
        raise ValueError("a model has at least 1 part: got a Sequential without members; put in what computes")
    if type(model).forward is not nn.Sequential.forward:
        raise ValueError(
            f"a Sequential calls its members in turn, which its stages do too: got {name} with a forward of its own; "
            "make what that does a member"
        )
    own = [name for slots in (model._parameters, model._buffers) for name, slot in slots.items() if slot is not None]
    own += [attribute for attribute, _ in loose_tensors(model)]
    if own or model._forward_hooks or model._forward_pre_hooks or model._backward_hooks or model._backward_pre_hooks:
        what = f"{', '.join(own)} of its own" if own else "hooks of its own"
        raise ValueError(
            f"a Sequential consists of its members, which is what stages get: got {name} with {what}; "
            "give that to a member"
        )


def check_unshared(members: Mapping[str, nn.Module]) -> None:
    """Raise `ValueError` where two members have the same parameter, buffer or other tensor."""
    owners: dict[Tensor, str] = {}
    for name, member in members.items():
        loose = [tensor for module in member.modules() for _, tensor in loose_tensors(module)]
        for tensor in (*member.parameters(), *member.buffers(), *loose):
            owner = owners.setdefault(tensor, name)
            if owner != name:
                kind, remedy = "tensor", "give each its own"
                if isinstance(tensor, nn.Parameter):
                    kind, remedy = "parameter", "give each its own and name both in the Pipeline's tied="
                raise ValueError(
                    f"members of a Sequential may be cut apart: members {owner} and {name} share a {kind}; "
                    f"{remedy}, or make them one member"
                )
