"""The double of NCCL keeps NCCL's rules: what would hang, crash or spoil data there raises here."""

import threading

import pytest
import torch
from nccl_double import Desk, End, MisuseError, PairWire, SumWire, Switchboard, Wire
from torch.distributed import AllreduceOptions


@pytest.fixture
def wire() -> Wire:
    return PairWire("a test")


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


def test_an_end_that_is_aborted_waits_no_longer_and_the_other_one_still_does(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nccl_double.PATIENCE_SECONDS", 0.1)
    data = memory(3, 1)
    ticket = ends[0].receive(data)
    threading.Timer(0.02, ends[0].abort).start()
    ticket.wait()
    assert data.tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="aborted"):
        ends[0].receive(memory(3))
    with pytest.raises(MisuseError, match="never met"):
        ends[1].send(memory(3)).wait()


def test_a_sum_is_there_when_all_ends_are() -> None:
    wire = SumWire("a test", 3)
    parts = [torch.tensor([1.0 + rank, 10.0]) for rank in range(3)]
    tickets = [End(wire, rank).queue("sum", part) for rank, part in enumerate(parts)]
    assert all(ticket.is_completed() for ticket in tickets)
    assert all(part.tolist() == [6.0, 30.0] for part in parts)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((memory(3), memory(4)), "a sum of 3 torch.uint8 and of 4 torch.uint8"),
        ((memory(3), memory(3).float()), "a sum of 3 torch.float32 and of 3 torch.uint8"),
        ((memory(3).cfloat(), memory(3).cfloat()), "torch.complex64, which NCCL does not add up"),
        ((memory(3).short(), memory(3).short()), "torch.int16, which NCCL does not add up"),
    ],
)
def test_what_is_summed_has_one_size_and_a_type_that_nccl_knows(
    parts: tuple[torch.Tensor, torch.Tensor], message: str
) -> None:
    wire = SumWire("a test", 2)
    End(wire, 0).queue("sum", parts[0])
    with pytest.raises(MisuseError, match=message):
        End(wire, 1).queue("sum", parts[1])


def test_communicators_are_made_in_one_order_on_all_ranks_and_in_all_replicas() -> None:
    board = Switchboard()
    desks = [Desk(board, rank) for rank in range(4)]
    assert isinstance(desks[0].connect((0, 2), "", (0, 1, "activation")), End)
    assert isinstance(desks[1].connect((1, 3), "", (0, 1, "activation")), End)
    with pytest.raises(MisuseError, match="communicator 0"):
        desks[2].connect((0, 2), "", (1, 0, "gradient"))
    with pytest.raises(MisuseError, match="communicator 0"):
        desks[3].group((2, 3), "")


def test_a_rank_at_neither_end_gets_no_communicator() -> None:
    assert Desk(Switchboard(), 2).connect((0, 1, 2), "", (0, 1, "activation")) is None


def test_a_group_sums_what_all_its_ranks_give() -> None:
    board = Switchboard()
    groups = [Desk(board, rank).group((0, 1), "") for rank in range(2)]
    data = [memory(2, 1), memory(2, 2)]
    for group, tensor in zip(groups, data):
        group.allreduce([tensor], AllreduceOptions())
    assert [tensor.tolist() for tensor in data] == [[3, 3], [3, 3]]
