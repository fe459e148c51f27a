"""The control channel by itself: ranks as threads that have nothing but a store and these connections."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch.distributed import HashStore

from stagewright.engine.control.channel import Control
from stagewright.engine.control.links import _HEADER
from stagewright.engine.control.progress import Place
from stagewright.schedules import create

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory without a name")

PATIENCE = 30.0


class Group:
    """What of a process group a control needs."""

    def __init__(self, store: HashStore, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def get_group_store(self) -> HashStore:
        return self._store


class Sleeper:
    """Notes how it was woken."""

    def __init__(self) -> None:
        self.hung_up, self.broken_off = threading.Event(), threading.Event()

    def hang_up(self) -> None:
        self.hung_up.set()

    def break_off(self) -> None:
        self.broken_off.set()


@contextmanager
def connected(num_ranks: int = 3, number: int = 1) -> Iterator[tuple[list[Control], list[Sleeper]]]:
    """The controls of ranks, each in a step of 1F1B."""
    store = HashStore()
    sleepers = [Sleeper() for _ in range(num_ranks)]
    made: dict[int, Control] = {}

    def make(rank: int) -> None:
        group: Any = Group(store, rank, num_ranks)
        made[rank] = Control(group, number, sleepers[rank])

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    controls = [made.pop(rank) for rank in range(num_ranks)]
    program = create("1f1b", num_ranks=num_ranks, num_microbatches=4).program()
    for rank, control in enumerate(controls):
        control.progress.begin(control.progress.add(program.streams[rank]), 7)
    del control
    try:
        yield controls, sleepers
    finally:
        for control in controls:
            control.leave()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def failures(controls: Sequence[Control]) -> list[str | None]:
    wait_for(lambda: all(control.failure for control in controls))
    return [control.failure for control in controls]


def test_the_first_reason_reaches_all_ranks_and_counts() -> None:
    with connected() as (controls, sleepers):
        controls[1].tell("rank 1 failed")
        assert failures(controls) == ["rank 1 failed"] * 3
        controls[0].tell("rank 0 failed")
        assert failures(controls) == ["rank 1 failed"] * 3
        wait_for(sleepers[0].hung_up.is_set)
        wait_for(sleepers[2].hung_up.is_set)


def test_a_rank_that_waits_in_gloo_is_broken_off() -> None:
    with connected() as (controls, sleepers):
        controls[2].progress.await_rank(0)
        controls[1].tell("rank 1 failed")
        wait_for(sleepers[2].broken_off.is_set)
        assert not sleepers[1].broken_off.is_set()


def test_a_rank_that_has_gone_is_named_with_its_last_instruction() -> None:
    with connected() as (controls, _):
        controls[1].progress.cells[0] = 3
        last = controls[1].progress.place
        controls[1]._watch.failure = "its own affair"  # a process that has gone tells nobody that the others have
        for link in controls[1]._watch._links.values():
            link.connection.shutdown(socket.SHUT_RDWR)
        reason = f"rank 1 failed {last}: its process has gone"
        assert controls[0].reason(1) == controls[2].reason(1) == reason
        assert last.instruction


def test_a_rank_that_has_left_is_no_failure_unless_it_is_waited_for() -> None:
    with connected() as (controls, _):
        controls[1].progress.num_batches = 3
        controls[1].leave()
        reason = "data ended on rank 1 after batch 3: rank 1 has returned while another rank still waits for what it"
        wait_for(lambda: controls[0]._watch.has_left(1) and controls[2]._watch.has_left(1))
        assert controls[0].failure is None
        assert controls[0].reason(1).startswith(reason)
        controls[2].progress.await_rank(1)
        assert all(str(failure).startswith(reason) for failure in failures([controls[0], controls[2]]))


def test_who_does_not_go_on_is_found_by_those_that_wait() -> None:
    with connected() as (controls, _):
        for control in controls:
            control.timeout = 0.5
        controls[0].progress.await_rank(1)
        controls[1].progress.await_rank(2)
        at = controls[2].progress.place
        for failure in failures(controls):
            assert str(failure).startswith("rank 2 does not go on; for ")
            assert str(failure).endswith(f" s it has been {at}")


def test_a_rank_that_goes_on_is_not_blamed_however_long_others_wait() -> None:
    with connected() as (controls, _):
        for control in controls:
            control.timeout = 0.5
        controls[0].progress.await_rank(1)
        asked = threading.Event()
        for _ in range(40):
            controls[1].progress.cells[0] = (controls[1].progress.cells[0] + 1) % 8
            asked.wait(0.05)
        assert [control.failure for control in controls] == [None] * 3


def test_a_rank_whose_thread_is_dead_too_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected() as (controls, _):
        controls[1]._watch.stir()
        monkeypatch.setattr(controls[1]._watch, "_take", lambda *_: None)
        at = controls[1].progress.place
        for control in controls:
            control.timeout = 0.5
        controls[0].progress.await_rank(1)
        expected = f"rank 1 does not answer; {at.last}"
        assert failures([controls[0], controls[2]]) == [expected] * 2


def test_batches_that_end_on_one_rank_first_end_all() -> None:
    with connected() as (controls, _):
        for control in controls:
            control.begin_batch()
        controls[0].drain()
        controls[1].begin_batch()
        for failure in failures(controls):
            assert str(failure).startswith("data ended on rank 0 after batch 1, and rank 1 has begun batch 2")


def test_batches_that_end_together_go_on_together() -> None:
    with connected() as (controls, _):
        for _ in range(3):
            for control in controls:
                control.begin_batch()
                control.begin_batch()
                control.drain()
        wait_for(lambda: len(controls[0]._watch._batches[2].ended) == 3)
        assert [control.failure for control in controls] == [None] * 3


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n" * 9, _HEADER.pack(3, 3) + b"\xff\xfe\xfd", _HEADER.pack(5, 2) + b"[]", bytes(99)],
)
def test_what_is_no_message_is_refused_and_its_sender_named(noise: bytes) -> None:
    with connected(2) as (controls, _):
        controls[1]._watch._links[0].connection.sendall(noise)
        for failure in failures(controls[:1]):
            assert str(failure).startswith("rank 1 ")


def test_ranks_on_other_hosts_say_where_they_are() -> None:
    with connected(2) as (controls, _):
        near = controls[0]._watch._links[1]
        near.page = None  # as if it could not be read
        controls[1]._watch._has_far_links = True
        for link in controls[1]._watch._links.values():
            link.page = None
        at = controls[1].progress.place
        controls[1]._watch.stir()
        wait_for(lambda: near.place == at)
        assert near.place != Place()


def test_a_control_that_is_dropped_leaves() -> None:
    before = set(threading.enumerate())
    with connected(2) as (controls, _):
        other, own = controls
        watch = own._watch
        del own, controls[1]
        wait_for(lambda: other._watch.has_left(1))
        assert watch.failure is None
    wait_for(lambda: not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()])
