"""Lookout: it ends the wait of a device once, for a reason that it has heard twice; of pipelines and of replicas."""

import gc
import threading
import weakref

import pytest
import torch
from nccl_double import LOOK_SECONDS, Desk, Switchboard

from stagewright.engine.errors import PeerError
from stagewright.engine.transport.collective import CollectiveGroup
from stagewright.engine.transport.lookout import Lookout


class Watched:
    """Something that waits, and hears one thing after the other."""

    def __init__(self, *heard: str | None, period: float = 0.01) -> None:
        self._heard = iter(heard)
        self.num_releases = 0
        self.released = threading.Event()
        self.lookout = Lookout(self.look, self.release, period)

    def look(self) -> str | None:
        return next(self._heard, None)

    def release(self) -> None:
        self.num_releases += 1
        self.released.set()


def test_what_it_hears_twice_running_counts() -> None:
    """A rank that has done its part may have returned while that part is still on its way."""
    watched = Watched(None, "a", None, "a", "b", "b")
    assert [watched.lookout.look() for _ in range(5)] == [False] * 5
    watched.lookout.check()
    assert watched.lookout.look()
    assert watched.num_releases == 1
    with pytest.raises(PeerError, match="b"):
        watched.lookout.check()


def test_its_thread_releases_once_and_ends() -> None:
    watched = Watched("a", "a", "a", "a")
    watched.lookout.start()
    watched.lookout.start()
    assert watched.released.wait(60)
    assert watched.lookout._thread is not None
    watched.lookout._thread.join(60)
    assert not watched.lookout._thread.is_alive()
    assert watched.num_releases == 1


def test_its_thread_keeps_nobody_alive_and_ends_with_them() -> None:
    watched = Watched()
    watched.lookout.start()
    thread, dead = watched.lookout._thread, weakref.ref(watched)
    del watched
    gc.collect()
    assert thread is not None
    thread.join(60)
    gc.collect()
    assert not thread.is_alive()
    assert dead() is None


def test_it_can_be_stopped() -> None:
    watched = Watched(period=30.0)
    watched.lookout.start()
    watched.lookout.stop()
    assert watched.lookout._thread is not None
    watched.lookout._thread.join(60)
    assert not watched.lookout._thread.is_alive()


def replicas() -> tuple[CollectiveGroup, CollectiveGroup]:
    """The groups of two replicas, on the double of NCCL."""
    board = Switchboard()
    groups = [Desk(board, rank).group((0, 1), "") for rank in range(2)]
    first, second = (
        CollectiveGroup(group, torch.device("cpu"), on_host=False, period=LOOK_SECONDS)  # type: ignore[arg-type]
        for group in groups
    )
    return first, second


def test_replicas_sum_on_the_device() -> None:
    first, second = replicas()
    sums = [first.start_sum(torch.tensor([1.0, 2j])), second.start_sum(torch.tensor([10.0, 1.0]).cfloat())]
    assert all(total.wait().tolist() == [11.0, 1 + 2j] for total in sums)


def test_a_replica_that_fails_ends_the_wait_of_the_others() -> None:
    first, second = replicas()
    total = first.start_sum(torch.ones(3))
    second.abort("rank 0 of replica 1 failed: no")
    with pytest.raises(PeerError, match="rank 0 of replica 1 failed: no"):
        total.wait()
    with pytest.raises(PeerError, match="rank 0 of replica 1 failed: no"):
        first.start_sum(torch.ones(3))


def test_a_replica_that_fails_waits_for_no_sum_itself() -> None:
    first, _ = replicas()
    total = first.start_sum(torch.ones(3))
    first.abort("rank 0 of replica 0 failed: no")
    assert total.wait().shape == (3,)
