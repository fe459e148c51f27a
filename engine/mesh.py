"""Mesh: several replicas of a pipeline, under data parallelism, and how their ranks are connected.

Rank (p, d) of a mesh is rank p of replica d of the pipeline. ``make_mesh`` gives a DeviceMesh of torch, and any other
DeviceMesh with a dimension ``pp`` serves as well; thread ranks, which torch.distributed does not know, have a
``ThreadMesh``.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stagewright.engine.launch.context import RankContext, default_transport
from stagewright.engine.transport.collective import CollectiveGroup
from stagewright.engine.transport.contract import Transport
from stagewright.engine.transport.gloo import GlooTransport
from stagewright.engine.transport.group import Alone, Divisible, Group
from stagewright.engine.transport.nccl import nccl_transport

PIPELINE: Final = "pp"
REPLICAS: Final = "dp"
TENSOR: Final = "tp"


@dataclass(frozen=True)
class ThreadMesh:
    """A mesh of thread ranks; it says of itself what a DeviceMesh says.

    Args:
        transport: connects all of its ranks.
        shape: ranks of each pipeline, and replicas.
    """

    transport: Divisible
    shape: tuple[int, int]
    mesh_dim_names: tuple[str, str] = (PIPELINE, REPLICAS)

    def get_local_rank(self, mesh_dim: str) -> int:
        """Where this rank is in a dimension."""
        return divmod(self.transport.rank, self.shape[1])[self.mesh_dim_names.index(mesh_dim)]

    def size(self, mesh_dim: int | None = None) -> int:
        """Ranks, or the length of a dimension."""
        return self.transport.num_ranks if mesh_dim is None else self.shape[mesh_dim]


Mesh: TypeAlias = DeviceMesh | ThreadMesh


def make_mesh(*, pp: int, dp: int = 1, tp: int = 1, context: RankContext | None = None) -> Mesh:
    """Arrange all ranks as replicas of a pipeline; every rank calls this alike.

    The ranks of a stage lie next to each other: rank p * dp * tp + d * tp + t is rank p of the pipeline's replica d.

    Args:
        pp: ranks of each pipeline.
        dp: replicas.
        tp: ranks that share the parameters of one stage among them; a dimension for the stages to use, such as with
            ``parallelize_module``, of which a pipeline takes no notice.
        context: of this rank; may be left out where torch.distributed is initialized.

    Returns:
        A DeviceMesh with the dimensions ``pp`` and ``dp``, and ``tp`` where that is more than 1.

    Raises:
        ValueError: there are not as many ranks.
    """
    threads = context.transport if context is not None else None
    on_threads = isinstance(threads, Divisible)
    if not on_threads and not dist.is_initialized():
        raise ValueError("a mesh connects ranks: initialize torch.distributed, or give the context of launch_local")
    num_ranks = threads.num_ranks if isinstance(threads, Divisible) else dist.get_world_size()
    if min(pp, dp, tp) < 1 or pp * dp * tp != num_ranks:
        raise ValueError(
            f"a mesh has pp x dp x tp = {pp} x {dp} x {tp} = {pp * dp * tp} ranks: here are {num_ranks}; give numbers "
            f"whose product is {num_ranks}"
        )
    if isinstance(threads, Divisible):
        if tp > 1:
            raise ValueError(f"thread ranks cannot share the parameters of a stage: got tp={tp}; take processes")
        return ThreadMesh(threads, (pp, dp))
    device_type = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    device_type = context.device.type if context is not None else device_type
    sizes = {PIPELINE: pp, REPLICAS: dp} | ({TENSOR: tp} if tp > 1 else {})
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def connect(mesh: Mesh | None, transport: Transport | None = None) -> tuple[Transport, Group]:
    """The transport of this rank's replica of the pipeline, and the group of the same rank of all replicas.

    Args:
        mesh: says which ranks these are; without one there is a single pipeline.
        transport: connects its ranks; over the default group of torch.distributed where left out.

    Raises:
        ValueError: the mesh has no pipeline, or both are given.
    """
    if mesh is None:
        transport = transport or default_transport()
        return transport, Alone(transport.device)
    if transport is not None:
        raise ValueError("a mesh says how its ranks are connected: give either mesh or transport")
    if isinstance(mesh, ThreadMesh):
        num_ranks, num_replicas = mesh.shape
        rank, replica = (mesh.get_local_rank(name) for name in mesh.mesh_dim_names)
        row = [other * num_replicas + replica for other in range(num_ranks)]
        return mesh.transport.mesh(row, range(rank * num_replicas, (rank + 1) * num_replicas))
    return _connect_processes(mesh)


def _connect_processes(mesh: DeviceMesh) -> tuple[Transport, Group]:
    names = mesh.mesh_dim_names or ()
    if PIPELINE not in names:
        raise ValueError(
            f"a Pipeline takes its ranks from the dimension {PIPELINE!r} of its mesh, and its replicas from "
            f"{REPLICAS!r}: this one has {list(names)}; make it with make_mesh(pp=…, dp=…) or mesh_dim_names"
        )
    for name in (PIPELINE, REPLICAS):
        if name in names:
            _check_order(mesh, name)
    on_gpus = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device(mesh.device_type)
    row = mesh.get_group(PIPELINE)
    if "nccl" in dist.get_backend_config(row):
        transport: Transport = nccl_transport(device, _lines(mesh, PIPELINE))
    else:
        transport = GlooTransport(row, device)
    if REPLICAS not in names:
        return transport, Alone(device)
    store = dist.distributed_c10d._get_default_store()
    ranks = mesh.mesh.flatten().tolist()
    number = store.add(f"stagewright meshes of {ranks}: rank {dist.get_rank()}", 1)  # all make theirs in one order
    everyone = (store, f"stagewright: a rank of mesh {number} of {ranks} has failed")
    return transport, CollectiveGroup(mesh.get_group(REPLICAS), device, everyone=everyone)


def _lines(mesh: DeviceMesh, name: str) -> list[list[int]]:
    """The ranks along a dimension, wherever one is in the others."""
    dimension = (mesh.mesh_dim_names or ()).index(name)
    lines: list[list[int]] = mesh.mesh.movedim(dimension, -1).reshape(-1, mesh.mesh.shape[dimension]).tolist()
    return lines


def _check_order(mesh: DeviceMesh, name: str) -> None:
    """Refuse a dimension whose ranks torch numbers in another order than the mesh: pipelines and replicas would mix."""
    for ranks in _lines(mesh, name):
        if ranks != sorted(ranks):
            raise ValueError(
                f"ranks ascend along the dimension {name!r} of a mesh, for torch.distributed sorts those of every "
                f"group: got {ranks}; make the mesh with {sorted(ranks)} there, or with make_mesh(pp=…, dp=…)"
            )
