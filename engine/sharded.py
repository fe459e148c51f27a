"""Sharded: stages whose parameters FSDP2 (``fully_shard``) deals out to the replicas.

FSDP gathers, frees and reduces by itself, forward by forward and backward by backward. Here it does so when the program
says so, once a batch: its own hooks find everything gathered, add gradients up, and leave the rest to instructions.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from torch import Tensor, nn

from stagewright.engine.locals import is_spread
from stagewright.engine.transport.group import Group
from stagewright.schedules import Placement

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class ShardedStage:
    """A stage with sharded parameters; each has a gradient on all replicas or on none, as FSDP wants it.

    Args:
        module: it, or modules within it, went through ``fully_shard``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = sharded_modules(module)
        inner = {id(below) for above in self._modules for below in sharded_modules(_module(above))[1:]}
        self._roots = [root for root in self._modules if id(root) not in inner]
        for root in self._roots:
            root.set_reshard_after_forward(False)
            root.set_reshard_after_backward(False)
            self._reduce_next(root, False)
        for part in self._modules:
            part.set_gradient_divide_factor(1.0)  # losses are divided by the rows of all replicas already

    def unshard(self) -> None:
        """Begin to gather all parameters; the first forward waits for them."""
        for module in self._modules:
            module.unshard(async_op=True)

    def reshard(self) -> None:
        """Free what was gathered."""
        for module in self._modules:
            module.reshard()

    def reduce(self) -> None:
        """Sum the gradients over the replicas, each of which keeps its shard of the sum.

        That is what FSDP does at the end of its last backward; torch's own pipelines call it in this way, too.
        """
        from torch.distributed.fsdp import fully_shard  # late: who has sharded nothing need not load it

        for root in self._roots:
            self._reduce_next(root, True)
            state = fully_shard.state(root)  # type: ignore[attr-defined]
            for each in state._state_ctx.all_states:
                for group in reversed(each._fsdp_param_groups):
                    group.post_backward()
            state._root_post_backward_final_callback()
            self._reduce_next(root, False)

    def clear(self) -> None:
        """Forget a batch that has failed."""
        for root in self._roots:
            with suppress(RuntimeError, AttributeError):  # it has not computed anything yet, or this torch cannot
                root.reset_iter_state()

    def _reduce_next(self, root: "FSDPModule", wanted: bool) -> None:
        root.set_is_last_backward(wanted)
        root.set_requires_gradient_sync(wanted)


def sharded_modules(module: nn.Module) -> "list[FSDPModule]":
    """The modules of a stage that went through ``fully_shard``, from the outermost to the innermost."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever has called fully_shard has imported it
    return [] if fsdp is None else [part for part in module.modules() if isinstance(part, fsdp.FSDPModule)]


def _module(part: "FSDPModule") -> nn.Module:
    """It is one, though its class does not say so."""
    assert isinstance(part, nn.Module)
    return part


def is_reduced_by_itself(tensor: Tensor) -> bool:
    """Whether a parameter lies dealt out to the replicas, so that FSDP, and nobody else, sums its gradient."""
    return is_spread(tensor) and "dp" in (tensor.device_mesh.mesh_dim_names or ())


def check_sharded(
    modules: Mapping[int, nn.Module],
    placement: Placement,
    group: Group,
    *,
    has_versions: bool,
    tied: Sequence[Sequence[str]],
    has_masters: bool,
) -> None:
    """Refuse what does not go together with sharded stages.

    Raises:
        ValueError: something does not, with what does.
    """
    for stage, module in modules.items():
        parts = sharded_modules(module)
        if not parts:
            continue
        for part in parts:
            for name, parameter in _module(part).named_parameters():
                if group.size == 1 or not is_reduced_by_itself(parameter):
                    raise ValueError(
                        f"a sharded stage has its shards in its replicas: {name} of stage {stage} is not sharded over "
                        'the dimension "dp" of the mesh, or the Pipeline has no such mesh; give it mesh=mesh, with '
                        'fully_shard(module, mesh=mesh["dp"])'
                    )
        if has_versions:
            raise ValueError(
                f"stage {stage} is sharded, and an asynchronous schedule keeps several versions of it: take a "
                "synchronous schedule"
            )
        if len(placement.replicas_of(stage)) > 1:
            raise ValueError(
                f"stage {stage} is sharded, and the schedule has it on several ranks of one pipeline: take a schedule "
                "with one copy of each stage"
            )
        if tied or has_masters:
            wish = "tied weights" if tied else "master_weights"
            remedy = "leave that stage whole" if tied else "give fully_shard an mp_policy=MixedPrecisionPolicy(…)"
            raise ValueError(f"stage {stage} is sharded, which does not go with {wish}: {remedy}")
