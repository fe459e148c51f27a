"""Collective: sums over replicas by the all-reduce of a torch.distributed process group."""

from contextlib import suppress
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.engine.errors import PeerError
from stagewright.engine.transport.group import Sum

# How often a rank that waits for a sum on CPUs looks whether another has failed.
_LOOK: Final = timedelta(seconds=0.5)
_FAILED: Final = "stagewright: a replica has failed"


class CollectiveGroup:
    """All-reduces of one process group.

    On GPUs nobody waits on the host; where a replica fails there, NCCL's own watchdog, or whoever started the
    processes, ends the others.

    Args:
        group: the process group of the same rank of all replicas.
        device: where the tensors live.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.device = device
        self._group = group
        self._on_host = "nccl" not in dist.get_backend_config(group)

    def start_sum(self, tensor: Tensor) -> Sum:
        """Begin an all-reduce in place."""
        if self.size == 1:
            return _CollectiveSum(self, tensor, None)
        try:
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        except RuntimeError as error:
            raise PeerError(self._reason(error)) from error
        return _CollectiveSum(self, tensor, work)

    def wait_for(self, work: dist.Work) -> None:
        """Block until an all-reduce is done, or on GPUs let the current stream wait for it.

        Raises:
            PeerError: a replica has failed, or its process has gone.
        """
        while True:
            try:
                if self._on_host:
                    work.wait(_LOOK)
                else:
                    work.wait()
                return
            except RuntimeError as error:
                if work.is_completed() or not self._on_host or self._has_failed():
                    raise PeerError(self._reason(error)) from error

    def abort(self, reason: str) -> None:
        """Leave word where the others look."""
        if self.size > 1 and not self._has_failed():
            with suppress(RuntimeError):  # whoever kept the store may have gone
                self._group.get_group_store().set(_FAILED, reason)

    def _has_failed(self) -> bool:
        try:
            return self._group.get_group_store().check([_FAILED])
        except RuntimeError:
            return True

    def _reason(self, error: RuntimeError) -> str:
        with suppress(RuntimeError):
            store = self._group.get_group_store()
            if store.check([_FAILED]):
                return store.get(_FAILED).decode()
        return f"another replica of this rank has gone, or the connection to it ({error})"


class _CollectiveSum:
    __slots__ = ("_group", "_tensor", "_work")

    def __init__(self, group: CollectiveGroup, tensor: Tensor, work: dist.Work | None) -> None:
        self._group, self._tensor, self._work = group, tensor, work

    def wait(self) -> Tensor:
        """Block until the all-reduce is done."""
        if self._work is not None:
            self._group.wait_for(self._work)
        return self._tensor
