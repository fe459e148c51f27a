"""What ranks do on meshes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain import make_batch, make_stage, momentum, squared_error
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stagewright.engine import Pipeline, RankContext, make_mesh
from stagewright.engine.mesh import connect
from stagewright.engine.transport.group import gather_bytes, gather_rows, share


def place(context: RankContext, pp: int, dp: int) -> tuple[Any, ...]:
    mesh = make_mesh(pp=pp, dp=dp, context=context)
    transport, group = connect(mesh)
    of_pipeline = transport.gather(bytes([context.rank]))
    of_replicas = gather_bytes(group, bytes([context.rank]) * (context.rank + 1))
    value = torch.tensor([context.rank - 2.5, -0.0])
    share(group, value)
    return (
        (mesh.get_local_rank("pp"), mesh.get_local_rank("dp")),
        (transport.rank, transport.num_ranks, group.rank, group.size, mesh.size(0), mesh.size(1), mesh.size()),
        [data[0] for data in of_pipeline],
        [(data[0], len(data)) for data in of_replicas],
        gather_rows(group, torch.tensor([context.rank, 7])).tolist(),
        value.tolist(),
    )


def use_own_mesh(context: RankContext) -> tuple[Any, ...]:
    """Meshes that a trainer has made itself, with dimensions of its own."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "pp"))
    with Pipeline(
        make_stage, schedule="1f1b", num_microbatches=2, loss_fn=squared_error, optimizer=momentum, mesh=mesh
    ) as pipe:
        pipe.train_step(*make_batch(4, pipe.replica))
        placed = pipe.rank, pipe.replica, pipe.num_replicas
    alone = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    with Pipeline(make_stage, schedule="1f1b", num_microbatches=2, mesh=alone) as pipe:
        assert (pipe.rank, pipe.num_replicas) == (context.rank, 1)
    with pytest.raises(ValueError, match=r"dimension 'pp' of its mesh.*\['dp'\]"):
        Pipeline(make_stage, num_microbatches=2, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    with pytest.raises(ValueError, match="either mesh or transport"):
        Pipeline(make_stage, num_microbatches=2, mesh=mesh, transport=context.transport)
    assert dist.is_initialized()
    return placed


def use_mesh_of(context: RankContext, grids: list[Any], names: tuple[str, ...]) -> list[str]:
    """What each grid of ranks leads to: a refusal, or a loss."""
    said = []
    for grid in grids:
        mesh = DeviceMesh("cpu", torch.tensor(grid), mesh_dim_names=names)
        try:
            with Pipeline(
                make_stage, schedule="1f1b", num_microbatches=2, loss_fn=squared_error, mesh=mesh, share_loss=True
            ) as pipe:
                batch = [tensor.split([6, 3])[pipe.replica] for tensor in make_batch(9, 0)]
                loss = pipe.forward_backward(*batch)
                assert loss is not None
                said.append(f"{loss.item():.12f}")
        except ValueError as error:
            said.append(str(error))
    return said
