"""Checkpoint, spread: parameters that lie on several ranks (DTensor) are whole in a checkpoint.

So a training goes on with other shards, or with none. Ranks that differ only in a further dimension of the mesh, such
as ``tp``, hold parts of the same parameters: all of them gather, and the first of them writes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stagewright.engine.locals import is_spread
from stagewright.engine.mesh import PIPELINE, REPLICAS
from stagewright.engine.pipeline import Pipeline


def writes(pipe: Pipeline) -> bool:
    """Whether this rank is the first of those that hold parts of the same parameters in further dimensions."""
    mesh = pipe._mesh
    if not isinstance(mesh, DeviceMesh):
        return True
    further = set(mesh.mesh_dim_names or ()) - {PIPELINE, REPLICAS}
    return all(mesh.get_local_rank(name) == 0 for name in further)


def gathered(value: Any, *, keeps: bool = True) -> Any:
    """A value with each DTensor in it whole, on the CPU; all ranks that have parts of it call this alike.

    Args:
        value: of dicts, lists, tuples, tensors, and whatever else.
        keeps: whether this rank needs them; if not, they stay as they are, and it only gives its parts.
    """
    if isinstance(value, Tensor):
        if not is_spread(value):
            return value
        whole: Tensor = value.full_tensor().detach()
        return whole.cpu() if keeps else value
    if isinstance(value, Mapping):
        pairs = {key: gathered(member, keeps=keeps) for key, member in value.items()}
        return pairs if any(pairs[key] is not member for key, member in value.items()) else value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(gathered(member, keeps=keeps) for member in value)
    return value


def spread_as(now: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor, spread as another one of its shape is; nothing is sent for that."""
    if not is_spread(now) or is_spread(whole):
        return whole
    from torch.distributed.tensor import DTensor, Replicate  # it is there: see is_spread

    mesh = now.device_mesh
    everywhere = [Replicate()] * mesh.ndim
    replicated = DTensor.from_local(whole.to(now.device), mesh, everywhere, run_check=False)
    with torch.no_grad():
        spread: Tensor = replicated.redistribute(placements=now.placements)
    return spread
