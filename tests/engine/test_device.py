"""Tensors from device to device, on the double of NCCL: fixed shapes after the first step, layouts sent once."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from launching import launch_on
from nccl_double import transports_on_double
from plain import assert_same, make_batch, make_stage, momentum, squared_error, train_pipelined, train_plainly
from shapes import rows_of, schedules_of, synchronous_names
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from stagewright.engine import PeerError, Pipeline, RankContext
from stagewright.engine.transport.contract import Channel, Session
from stagewright.engine.transport.device import DeviceTransport
from stagewright.engine.transport.hub import Hub
from stagewright.engine.value import pack, unpack

CHANNEL = Channel(0, 1, "activation", 4)


def connected() -> tuple[DeviceTransport, DeviceTransport]:
    """Two ranks, both in this thread."""
    source, destination = transports_on_double(Hub(2))
    source.open([CHANNEL])
    destination.open([CHANNEL])
    return source, destination


def begin(transports: Sequence[DeviceTransport], sessions: Sequence[Session]) -> None:
    for transport, session in zip(transports, sessions):
        transport.begin(session)


VALUES: dict[str, Any] = {
    "several tensors": (torch.arange(3), [torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor(True)]),
    "nothing": None,
    "no tensor": {"a": None, 1: []},
    "empty tensors": [torch.empty(0, 3), torch.arange(2), torch.empty(4, 0)],
    "no dimensions": torch.tensor(2**62 + 1),
    "with gaps": torch.arange(12).reshape(3, 4)[:, ::2],
    "transposed": torch.arange(12.0).reshape(3, 4).T,
    "expanded": torch.arange(3).expand(4, 3),
    "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negated": torch.tensor([1 + 2j]).conj().imag,
    "one element out of many": torch.arange(5.0)[::7],
    "in the middle": torch.arange(10, dtype=torch.int16)[3:7],
}


@pytest.mark.parametrize("fixed_shapes", [True, False])
@pytest.mark.parametrize("name", VALUES)
def test_any_value_arrives(name: str, fixed_shapes: bool) -> None:
    transports = source, destination = connected()
    sessions = Session(fixed_shapes), Session(fixed_shapes)
    for _ in range(2):
        begin(transports, sessions)
        source.send(CHANNEL, pack(VALUES[name], "stage 0"), 1, 0)
        received = destination.post(CHANNEL, 1, 0).wait()
        source.end()
        torch.testing.assert_close(unpack(received.layout.skeleton, received.tensors), VALUES[name], rtol=0, atol=0)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("fixed_shapes", [True, False])
def test_receives_are_queued_in_the_order_of_the_channel_in_whatever_order_they_are_taken(
    order: tuple[int, ...], fixed_shapes: bool
) -> None:
    """The double refuses any other order, for the sizes differ."""
    transports = source, destination = connected()
    sessions = Session(fixed_shapes), Session(fixed_shapes)
    for _ in range(3):
        begin(transports, sessions)
        for microbatch in range(3):
            source.send(CHANNEL, pack(torch.full((microbatch + 1,), microbatch), "stage 0"), 1, microbatch)
        receipts = [destination.post(CHANNEL, 1, microbatch) for microbatch in range(3)]
        for microbatch in order:
            assert receipts[microbatch].wait().tensors[0].tolist() == [microbatch] * (microbatch + 1)
        source.end()


def test_known_receives_are_queued_when_they_are_posted() -> None:
    """From the second step on no send waits for the moment its message is needed."""
    transports = source, destination = connected()
    sessions = Session(fixed_shapes=True), Session(fixed_shapes=True)
    for step in range(2):
        begin(transports, sessions)
        receipt = destination.post(CHANNEL, 1, 0)
        source.send(CHANNEL, pack(torch.ones(3), "stage 0"), 1, 0)
        tickets = source._under_way[CHANNEL.line].tickets
        assert [ticket.is_completed() for ticket in tickets] == ([False] if step == 0 else [])
        receipt.wait()
        source.end()


def test_shapes_are_fixed_after_the_first_step() -> None:
    transports = source, destination = connected()
    sessions = Session(fixed_shapes=True), Session(fixed_shapes=True)
    begin(transports, sessions)
    source.send(CHANNEL, pack([torch.ones(3, 2), None], "stage 0"), 1, 0)
    destination.post(CHANNEL, 1, 0).wait()
    begin(transports, sessions)
    with pytest.raises(ValueError, match=r"microbatch 0 of stage 1 got float32\[3, 2\] then, and float32\[4, 2\] now"):
        source.send(CHANNEL, pack([torch.ones(4, 2), None], "stage 0"), 1, 0)


def test_what_was_sent_is_released_once_it_has_gone_out() -> None:
    transports = source, destination = connected()
    begin(transports, (Session(fixed_shapes=False), Session(fixed_shapes=False)))
    alive = []
    for microbatch in range(20):
        data = torch.full((100,), microbatch)
        alive.append(StorageWeakRef(data.untyped_storage()))
        source.send(CHANNEL, pack(data, "stage 0"), 1, microbatch)
        del data
        destination.post(CHANNEL, 1, microbatch).wait()
        assert sum(not storage.expired() for storage in alive) <= 1
        assert len(source._under_way[CHANNEL.line].tickets) <= 1
    source.end()
    assert all(storage.expired() for storage in alive)


def test_microbatches_of_later_batches_have_the_shapes_of_the_first() -> None:
    """Asynchronous schedules count microbatches on and on within one run."""
    transports = source, destination = connected()
    sessions = [Session(fixed_shapes=True, num_microbatches=2) for _ in range(2)]
    begin(transports, sessions)
    for microbatch in range(20):
        source.send(CHANNEL, pack(torch.full((1 + microbatch % 2,), microbatch), "stage 0"), 1, microbatch)
        assert destination.post(CHANNEL, 1, microbatch).wait().tensors[0].tolist() == [microbatch] * (
            1 + microbatch % 2
        )
    assert [len(session.layouts) for session in sessions] == [2, 2]
    with pytest.raises(ValueError, match=r"microbatch 20 of stage 1 got int64\[1\] then"):
        source.send(CHANNEL, pack(torch.ones(5), "stage 0"), 1, 20)


# Ranks that go


@pytest.mark.parametrize(("goes", "message"), [("abort", "rank 0 failed: no"), ("leave", "rank 0 has returned")])
def test_a_device_waits_no_longer_for_what_a_rank_that_has_gone_would_send(goes: str, message: str) -> None:
    """Its communicators are aborted; without that NCCL waits for ever, and the host for NCCL."""
    transports = source, destination = connected()
    sessions = Session(fixed_shapes=True), Session(fixed_shapes=True)
    begin(transports, sessions)
    source.send(CHANNEL, pack(torch.ones(3), "stage 0"), 1, 0)
    destination.post(CHANNEL, 1, 0).wait()
    begin(transports, sessions)
    receipt = destination.post(CHANNEL, 1, 0)
    source.abort("rank 0 failed: no") if goes == "abort" else source.leave()
    with pytest.raises(PeerError, match=message):
        receipt.wait()
    with pytest.raises(PeerError, match=message):
        destination.begin(sessions[1])


def test_a_device_waits_no_longer_for_a_rank_that_will_not_take_what_was_sent() -> None:
    transports = source, destination = connected()
    begin(transports, (Session(fixed_shapes=True), Session(fixed_shapes=True)))
    source.send(CHANNEL, pack(torch.ones(3), "stage 0"), 1, 0)
    destination.leave()
    with pytest.raises(PeerError, match="rank 1 has returned"):
        source.end()


def test_a_rank_that_fails_waits_for_nothing_on_its_own_device() -> None:
    transports = source, destination = connected()
    begin(transports, (Session(fixed_shapes=True), Session(fixed_shapes=True)))
    source.send(CHANNEL, pack(torch.ones(3), "stage 0"), 1, 0)
    (ticket,) = source._under_way[CHANNEL.line].tickets
    assert not ticket.is_completed()
    source.abort("rank 0 failed: no")
    assert ticket.is_completed()


def test_a_rank_that_has_done_its_part_may_go() -> None:
    transports = source, destination = connected()
    sessions = Session(fixed_shapes=True), Session(fixed_shapes=True)
    begin(transports, sessions)
    source.send(CHANNEL, pack(torch.ones(3), "stage 0"), 1, 0)
    receipt = destination.post(CHANNEL, 1, 0)
    assert receipt.wait().tensors[0].tolist() == [1.0] * 3
    source.end()
    source.leave()
    for _ in range(3):
        assert not destination._lookout.look()
    destination.end()


# In whole pipelines


class Watched:
    """Counts the layouts that a rank's host sends."""

    def __init__(self, transport: DeviceTransport) -> None:
        self.num_layouts = 0
        self._send = transport._host.send
        transport._host.send = self.send  # type: ignore[method-assign]

    def send(self, channel: Channel, *message: Any) -> None:
        self.num_layouts += channel.kind in ("activation", "gradient")
        self._send(channel, *message)


def count_layouts(context: RankContext, dynamic_shapes: bool) -> list[int]:
    """Layouts sent by each training step, with evaluations of other shapes in between."""
    assert isinstance(context.transport, DeviceTransport)
    watched = Watched(context.transport)
    with Pipeline(
        make_stage,
        schedule="1f1b",
        num_microbatches=4,
        loss_fn=squared_error,
        optimizer=momentum,
        transport=context.transport,
        dynamic_shapes=dynamic_shapes,
    ) as pipe:
        counts = []
        for step in range(4):
            watched.num_layouts = 0
            pipe.train_step(*make_batch(8, step))
            counts.append(watched.num_layouts)
            pipe.eval_step(*make_batch(15, step), num_microbatches=3 + step)
    return counts


def test_layouts_travel_in_the_first_step_only() -> None:
    """Evaluation may have any shapes at any time: it announces its own."""
    for first, _, *others in launch_on("double", count_layouts, 3, (False,)):
        assert first > 0
        assert others == [0, 0]  # the second one may run another program, for the first found out what the loss is


def test_layouts_travel_with_every_message_where_shapes_change() -> None:
    assert launch_on("double", count_layouts, 3, (True,)) == [[4] * 4, [8] * 4, [4] * 4]


def train_on_changing_shapes(context: RankContext, dynamic_shapes: bool) -> list[float]:
    losses = []
    with Pipeline(
        make_stage,
        schedule="1f1b",
        num_microbatches=4,
        loss_fn=squared_error,
        optimizer=momentum,
        transport=context.transport,
        share_loss=True,
        dynamic_shapes=dynamic_shapes,
    ) as pipe:
        for step, rows in enumerate((8, 8, 11, 4)):
            loss = pipe.train_step(*make_batch(rows, step))
            assert loss is not None
            losses.append(loss.item())
    return losses


def test_shapes_that_change_are_an_error_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"keeps its shapes after the first step: .*dynamic_shapes=True") as caught:
        launch_on("double", train_on_changing_shapes, 3, (False,))
    assert any("rank 0 failed at 0SEND_F0 (step 2)" in note for note in caught.value.__notes__)


def test_shapes_may_change_with_dynamic_shapes() -> None:
    losses = launch_on("double", train_on_changing_shapes, 3, (True,))
    assert losses == launch_on("threads", train_on_changing_shapes, 3, (True,))


class Forked(nn.Module):
    """Hands on several tensors, with and without gradient, and what is no tensor at all."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.block = make_stage(stage)

    def forward(self, value: Any) -> Any:
        x = value["x"] if isinstance(value, dict) else value
        out = self.block(x)
        return {"x": out, "skip": [x, None], "mask": x > 0, "count": torch.tensor(x.shape[0])}


def loss_of_forked(output: dict[str, Any], target: Tensor) -> Tensor:
    return squared_error(output["x"] + output["skip"][0], target)


@pytest.mark.parametrize("dynamic_shapes", [False, True])
@pytest.mark.parametrize("name", synchronous_names())
def test_every_schedule_trains_as_a_plain_loop_does(name: str, dynamic_shapes: bool) -> None:
    schedule = next(schedules_of(name, (4, 2), (8,)))
    rows = rows_of(schedule)
    options = {"schedule": schedule, "dynamic_shapes": dynamic_shapes}
    results = launch_on("double", train_pipelined, schedule.num_ranks, (rows, 3, options))
    assert_same(results, train_plainly(schedule.num_stages, rows, 3))


def train_forked(context: RankContext) -> list[float]:
    losses = []
    with Pipeline(
        Forked,
        schedule="interleaved",
        num_microbatches=4,
        loss_fn=loss_of_forked,
        optimizer=momentum,
        transport=context.transport,
        share_loss=True,
    ) as pipe:
        for step in range(3):
            loss = pipe.train_step(*make_batch(8, step))
            assert loss is not None
            losses.append(loss.item())
    return losses


def test_several_tensors_in_a_message() -> None:
    assert launch_on("double", train_forked, 2) == launch_on("threads", train_forked, 2)
