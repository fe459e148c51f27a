"""Collective: sums over replicas by the all-reduce of a torch.distributed process group."""

from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from stagewright.engine.control.progress import REPLICAS, Progress
from stagewright.engine.errors import PeerError
from stagewright.engine.transport.group import Sum
from stagewright.engine.transport.lookout import LOOK_SECONDS, Lookout

# How often a rank that waits for a sum on CPUs looks whether another has failed.
_LOOK: Final = timedelta(seconds=0.5)
_REASON_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = 0.02
_FAILED: Final = "stagewright: a replica has failed"


class CollectiveGroup:
    """All-reduces of one process group.

    On GPUs nobody waits on the host; a lookout ends their wait where a replica fails.

    Args:
        group: the process group of the same rank of all replicas.
        device: where the tensors live.
        on_host: whether the host waits for a sum; as the group's backend says where left out.
        period: seconds from one look of the lookout to the next.
        everyone: a store, and a key in it, where all ranks of all replicas leave word of failures and look for it;
            those of this group where left out.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        on_host: bool | None = None,
        period: float = LOOK_SECONDS,
        everyone: tuple[Store, str] | None = None,
    ) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.device = device
        self._group = group
        self._on_host = "nccl" not in dist.get_backend_config(group) if on_host is None else on_host
        self._store, self._key = everyone or (group.get_group_store(), _FAILED)
        self.progress = Progress(self.rank)  # of this rank in its pipeline
        self._newest: dist.Work | None = None
        self._lookout = Lookout(self._look, group.abort, period)

    def start_sum(self, tensor: Tensor) -> Sum:
        """Begin an all-reduce in place."""
        if self.size == 1:
            return _CollectiveSum(self, tensor, None)
        self._lookout.check()
        try:
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        except RuntimeError as error:
            raise PeerError(self._reason(error)) from error
        if not self._on_host:
            self._newest = work
            self._lookout.start()
        return _CollectiveSum(self, tensor, work)

    def wait_for(self, work: dist.Work) -> None:
        """Block until an all-reduce is done, or on GPUs let the current stream wait for it.

        Raises:
            PeerError: a replica has failed, or its process has gone.
        """
        self.progress.await_rank(REPLICAS)
        try:
            while not self._is_done(work):
                pass
        finally:
            self.progress.awaits_nobody()

    def _is_done(self, work: dist.Work) -> bool:
        try:
            if self._on_host:
                work.wait(_LOOK)
            else:
                work.wait()
            self._lookout.check()
        except PeerError:
            raise
        except RuntimeError as error:
            if work.is_completed() or not self._on_host or self._has_failed():
                raise PeerError(self._reason(error)) from error
            return False
        return True

    def abort(self, reason: str) -> None:
        """Leave word where the others look, and let this one's device wait for none of them any more."""
        if self.size > 1 and not self._has_failed():
            with suppress(RuntimeError):  # whoever kept the store may have gone
                self._store.set(self._key, reason)
        if self._is_awaited():
            self._group.abort()

    def _has_failed(self) -> bool:
        try:
            return self._store.check([self._key])
        except RuntimeError:
            return True

    def _is_awaited(self) -> bool:
        """Whether the device has a sum to wait for; they are done in order."""
        newest = self._newest
        return newest is not None and not newest.is_completed()

    def _look(self) -> str | None:
        try:
            return self._told() if self._is_awaited() else None
        except RuntimeError as error:
            return self._reason(error)

    def _told(self) -> str | None:
        """What a replica that has failed has left word of."""
        return self._store.get(self._key).decode() if self._store.check([self._key]) else None

    def _reason(self, error: RuntimeError) -> str:
        """Why a sum will never be there; gives those a moment that know more."""
        deadline = monotonic() + _REASON_SECONDS
        with suppress(RuntimeError):
            while (told := self._told()) is None and monotonic() < deadline:
                sleep(_PAUSE_SECONDS)
            if told is not None:
                return told
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
