"""Ranks as threads: results in order, the first error raised, whoever waits is woken, no thread is left."""

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from failing import fail_in_step, return_early
from launching import launch_on

from stagewright.engine import PeerError, RankContext, RankError, launch_local
from stagewright.engine.transport.contract import Channel
from stagewright.engine.transport.hub import Hub


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(5)  # one that is just ending is not left
    assert not [thread for thread in left if thread.is_alive()]


def test_results_come_in_the_order_of_ranks() -> None:
    def work(context: RankContext, factor: int) -> int:
        time.sleep(0.02 * (3 - context.rank))  # the last one is first
        return factor * context.rank

    assert launch_local(work, 4, backend="threads", args=(10,)) == [0, 10, 20, 30]


@pytest.mark.parametrize("kind", ["threads", "double"])
@pytest.mark.parametrize(("where", "instruction"), [("forward", "1F2"), ("backward", "1B2"), ("optimizer", "1STEP@1")])
def test_an_error_in_a_step_is_raised_with_its_type_and_place(kind: Any, where: str, instruction: str) -> None:
    with pytest.raises(ValueError, match=f"^boom in {where}") as caught:
        launch_on(kind, fail_in_step, 3, (where,))
    assert caught.value.__notes__ == [f"rank 1 failed at {instruction} (step 1)"]


def test_ranks_that_wait_are_woken_and_learn_why() -> None:
    seen: dict[int, str] = {}

    def work(context: RankContext) -> None:
        if context.rank == 1:
            raise ValueError("boom")
        try:
            context.transport.gather(b"")
        except PeerError as error:
            seen[context.rank] = str(error)
            raise

    with pytest.raises(ValueError, match="boom"):
        launch_local(work, 3, backend="threads")
    assert seen == {0: "rank 1 failed: ValueError: boom", 2: "rank 1 failed: ValueError: boom"}


def test_the_first_error_is_raised_and_not_that_of_the_lowest_rank() -> None:
    first = threading.Event()

    def work(context: RankContext) -> None:
        if context.rank == 0:
            first.wait()
            raise RuntimeError("what came of it")
        try:
            raise ValueError("boom")
        finally:
            threading.Timer(0.05, first.set).start()

    with pytest.raises(ValueError, match="boom"):
        launch_local(work, 2, backend="threads")


def test_who_waits_for_a_rank_that_has_returned_is_told() -> None:
    with pytest.raises(PeerError, match="rank 1 has returned while another rank still waits for what it sends"):
        launch_local(return_early, 3, backend="threads")


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_rank_does_not_end_the_program(end: type[BaseException]) -> None:
    def work(context: RankContext) -> None:
        raise end(0)

    with pytest.raises(RankError, match=rf"rank 0 ended with {end.__name__}\(0\)"):
        launch_local(work, 1, backend="threads")


def test_an_interrupt_wakes_ranks_that_wait() -> None:
    main = threading.get_ident()

    def work(context: RankContext) -> None:
        if context.rank == 0:
            time.sleep(0.05)
            signal.pthread_kill(main, signal.SIGINT)
            context.transport.post(Channel(1, 0, "gradient"), 0, 0).wait()  # which never comes
        context.transport.gather(b"")

    with pytest.raises(KeyboardInterrupt):
        launch_local(work, 2, backend="threads")


# The hub


def test_a_message_that_was_laid_down_can_be_taken_after_its_sender_has_returned() -> None:
    hub = Hub(2)
    message: Any = object()
    hub.put((0, 1, "activation", 0), message)
    hub.leave(0, "rank 0 has returned")
    assert hub.take((0, 1, "activation", 0)) is message
    with pytest.raises(PeerError, match="rank 0 has returned"):
        hub.take((0, 1, "activation", 1))


def test_the_first_reason_counts() -> None:
    hub = Hub(2)
    hub.fail("rank 1 failed")
    hub.fail("rank 0 failed")
    with pytest.raises(PeerError, match="rank 1 failed"):
        hub.gather(1, 0, b"")
