"""Locals: what this rank has of a tensor that is spread over several, such as a DTensor; any other one is all here."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_spread(tensor: Tensor | None) -> "TypeGuard[DTensor]":
    """Whether a tensor is a DTensor; whoever has one has imported the module, which takes every rank half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part, in the same memory."""
    if not is_spread(tensor):
        return tensor
    part: Tensor = tensor.to_local()
    return part


def spread_like(parameter: nn.Parameter, part: Tensor) -> Tensor:
    """A tensor of which this rank has the given part, spread as a parameter is."""
    if not is_spread(parameter):
        return part
    from torch.distributed.tensor import DTensor  # it is there: see is_spread

    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def settle_gradient(parameter: nn.Parameter) -> None:
    """Let a gradient be spread as its parameter is: sums that are still to be made are made."""
    gradient = parameter.grad
    if is_spread(parameter) and is_spread(gradient) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """This rank's part of a parameter's gradient."""
    settle_gradient(parameter)
    return None if parameter.grad is None else local_of(parameter.grad)


def groups_of(parameter: nn.Parameter) -> Sequence[dist.ProcessGroup]:
    """The groups of ranks over which a parameter is cut; each has the whole of one that is not."""
    if not is_spread(parameter):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(dimension)
        for dimension, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    )
