"""The double of NCCL keeps NCCL's rules: what would hang, crash or spoil data there raises here."""

import threading

import pytest
import torch
from nccl_double import End, MisuseError, Switchboard, Wire

from stagewright.engine.errors import PeerError
from stagewright.engine.transport.threads import Hub


@pytest.fixture
def hub() -> Hub:
    return Hub(2)


@pytest.fixture
def wire(hub: Hub) -> Wire:
    return Wire(hub, "a test")


@pytest.fixture
def ends(wire: Wire) -> tuple[End, End]:
    return End(wire, 0), End(wire, 1)


def memory(size: int, value: int = 0) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_the_kth_send_meets_the_kth_receive(ends: tuple[End, End]) -> None:
    source, destination = ends
    first, second = memory(3), memory(5)
    tickets = [source.send(memory(3, 1)), destination.receive(first), destination.receive(second)]
    assert [ticket.is_completed() for ticket in tickets] == [True, True, False]
    source.send(memory(5, 2))
    tickets[-1].wait()
    assert (first.tolist(), second.tolist()) == ([1] * 3, [2] * 5)


def test_sizes_must_be_equal(ends: tuple[End, End]) -> None:
    ends[0].send(memory(3))
    with pytest.raises(MisuseError, match="a send of 3 bytes meets a receive of 4"):
        ends[1].receive(memory(4))


def test_a_wrong_order_is_a_wrong_size(ends: tuple[End, End]) -> None:
    ends[1].receive(memory(5))
    ends[1].receive(memory(3))
    with pytest.raises(MisuseError, match="a send of 3 bytes meets a receive of 5"):
        ends[0].send(memory(3))


@pytest.mark.parametrize("kind", ["send", "receive"])
def test_a_send_must_meet_a_receive(ends: tuple[End, End], kind: str) -> None:
    getattr(ends[0], kind)(memory(3))
    with pytest.raises(MisuseError, match=f"a {kind} meets a {kind}"):
        getattr(ends[1], kind)(memory(3))


def test_a_failure_reaches_both_ends(ends: tuple[End, End]) -> None:
    ticket = ends[0].send(memory(3))
    with pytest.raises(MisuseError):
        ends[1].receive(memory(4))
    with pytest.raises(MisuseError, match="a send of 3 bytes"):
        ticket.wait()


def test_a_send_waits_for_its_receive_and_reads_its_memory_only_then(ends: tuple[End, End]) -> None:
    source, destination = ends
    data, there = memory(3, 1), memory(3)
    ticket = source.send(data)
    assert not ticket.is_completed()
    data.fill_(7)  # too early: it is still to be sent
    destination.receive(there)
    assert ticket.is_completed()
    assert there.tolist() == [7, 7, 7]


def test_two_kernels_of_one_communicator_never_run_at_the_same_time(wire: Wire) -> None:
    send, receive = wire.queue(0, "send", memory(3)), wire.queue(0, "send", memory(3))
    wire._running = True
    with pytest.raises(MisuseError, match="two kernels of one communicator"):
        wire.run(send, receive)


def test_two_threads_must_not_use_one_end_at_the_same_time(ends: tuple[End, End]) -> None:
    with ends[0]._in_use, pytest.raises(MisuseError, match="two threads"):
        ends[0].send(memory(3))


def test_memory_with_gaps_is_refused(ends: tuple[End, End]) -> None:
    with pytest.raises(MisuseError, match="gaps"):
        ends[0].send(memory(6)[::2])


def test_what_is_never_met_is_a_deadlock(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nccl_double.PATIENCE_SECONDS", 0.1)
    with pytest.raises(MisuseError, match="never met"):
        ends[0].send(memory(3)).wait()


def test_who_waits_learns_of_a_failure(hub: Hub, ends: tuple[End, End]) -> None:
    ticket = ends[0].send(memory(3))
    threading.Timer(0.05, hub.fail, ["rank 1 failed"]).start()
    with pytest.raises(PeerError, match="rank 1 failed"):
        ticket.wait()


def test_communicators_are_made_in_one_order_on_all_ranks(hub: Hub) -> None:
    board = Switchboard(hub)
    first, second = board.connector(0), board.connector(1)
    assert isinstance(first((0, 1, "activation")), End)
    with pytest.raises(MisuseError, match="communicator 0"):
        second((1, 0, "gradient"))


def test_a_rank_at_neither_end_gets_no_communicator(hub: Hub) -> None:
    assert Switchboard(hub).connector(2)((0, 1, "activation")) is None
