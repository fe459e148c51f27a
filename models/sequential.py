"""Any `nn.Sequential` as a model that can be cut between its members."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from stagewright.models.chain import Chain
from stagewright.models.cut import Part


def cut_sequential(build: Callable[[], nn.Sequential]) -> Chain:
    """Make an `nn.Sequential` a chain: each member is a part, and no other stage's memory is ever taken.

    `build` is called under `torch.device("meta")`; the members of a stage are then made real, and filled by their own
    `reset_parameters` with random numbers of their own, from the seed and their names. Stages have the names of the
    whole model's state dict, `2.weight` whichever stage holds member 2. A `build` that returns modules with memory,
    such as `lambda: model` for a trained one, gives its very modules.

    Raises `ValueError` where a member is there twice, or members share a parameter: they might be cut apart; and, when
    a stage is built, for a module with parameters or buffers that has no `reset_parameters`.
    """
    with torch.device("meta"):
        members = dict(build().named_children())
        num_members = len(build())
    if num_members != len(members):
        raise ValueError(
            f"members of a Sequential may be cut apart: got {num_members} members of which only {len(members)} are "
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


def check_unshared(members: Mapping[str, nn.Module]) -> None:
    """Raise `ValueError` where two members have the same parameter."""
    owners: dict[nn.Parameter, str] = {}
    for name, member in members.items():
        for parameter in member.parameters():
            owner = owners.setdefault(parameter, name)
            if owner != name:
                raise ValueError(
                    f"members of a Sequential may be cut apart: members {owner} and {name} share a parameter; "
                    f"give each its own and name both in the Pipeline's tied=, or make them one member"
                )
