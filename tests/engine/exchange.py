"""What ranks do to each other's messages; functions that processes can import."""

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from plain import make_batch, make_stage, momentum, squared_error
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from stagewright.engine import Pipeline, RankContext
from stagewright.engine.transport import neighbourhood
from stagewright.engine.transport.arena import FREE
from stagewright.engine.transport.contract import Channel, Receipt, Session
from stagewright.engine.transport.frame import FIRST_CAPACITY
from stagewright.engine.transport.gloo import GlooTransport
from stagewright.engine.transport.neighbour import Outbox
from stagewright.engine.value import Packed, pack

# One run on a channel: its depth, and the number of elements of each message.
Messages = tuple[int, Sequence[int]]


def numbers(run: int, index: int, size: int) -> Tensor:
    """What a message holds."""
    return torch.arange(size) + 1000 * run + index


def transport_of(context: RankContext, kind: str) -> GlooTransport:
    """One of its own for a test: over gloo alone, or in shared memory."""
    assert isinstance(context.transport, GlooTransport)
    return GlooTransport(context.transport.group, shares_memory=kind == "shared")


def exchange(context: RankContext, kind: str, runs: Sequence[Messages], seed: int) -> list[int]:
    """Rank 0 sends, rank 1 posts ahead and takes in a random order; returns what arrived wrong."""
    transport = transport_of(context, kind)
    channels = [Channel(0, 1, "activation", depth) for depth, _ in runs]
    wrong = []
    for run, (channel, (depth, sizes)) in enumerate(zip(channels, runs)):
        transport.open([channel])
        transport.begin(Session(fixed_shapes=False))
        if context.rank == 0:
            for index, size in enumerate(sizes):
                transport.send(channel, pack(numbers(run, index, size), "stage 0"), 1, index)
        else:
            order = random.Random(seed + run)
            posted: dict[int, Receipt] = {}
            next_one = 0
            while next_one < len(sizes) or posted:
                oldest = min(posted, default=next_one)
                if next_one < len(sizes) and next_one - oldest < depth and (not posted or order.random() < 0.7):
                    posted[next_one] = transport.post(channel, 1, next_one)
                    next_one += 1
                else:
                    index = order.choice(list(posted))
                    (tensor,) = posted.pop(index).wait().tensors
                    if not torch.equal(tensor, numbers(run, index, sizes[index])):
                        wrong.append(index)
        transport.end()
    transport.close()
    return wrong


def gather_much(context: RankContext, kind: str, sizes: Sequence[int]) -> list[list[bytes]]:
    """Every rank gives so many bytes of its own number, in turn; some give nothing."""
    own, transport = bytes([context.rank]), transport_of(context, kind)
    with closing(transport):
        return [transport.gather(own * (size if context.rank % 2 else 2 * size)) for size in sizes]


@dataclass
class Frames:
    """How many frames were alive at most, and how many are left; those received and those sent apart."""

    most_received: int = 0
    most_sent: int = 0
    left_received: int = 0
    left_sent: int = 0


class FrameCounter:
    """Counts the frames of a transport that are alive; only large ones, which leaves out what ranks agree on."""

    def __init__(self, transport: GlooTransport) -> None:
        self.frames = Frames()
        self._received: list[StorageWeakRef] = []
        self._sent: list[StorageWeakRef] = []
        self._receive, self._write = transport.receive, transport.codec.write
        transport.receive = self.receive  # type: ignore[method-assign]
        transport.codec.write = self.write  # type: ignore[method-assign]

    def receive(self, data: Tensor, source: int, tag: int) -> Any:
        """Note a receive buffer."""
        if data.untyped_storage().nbytes() > FIRST_CAPACITY:
            self._received.append(StorageWeakRef(data.untyped_storage()))
        self.frames.most_received = max(self.frames.most_received, self.count().left_received)
        return self._receive(data, source, tag)

    def write(self, packed: Packed, stage: int, microbatch: int) -> Tensor:
        """Note a frame to be sent."""
        frame = self._write(packed, stage, microbatch)
        if frame.numel() > FIRST_CAPACITY:
            self._sent.append(StorageWeakRef(frame.untyped_storage()))
        self.frames.most_sent = max(self.frames.most_sent, self.count().left_sent)
        return frame

    def count(self) -> Frames:
        """The most so far, and what is alive now."""
        self._received = [frame for frame in self._received if not frame.expired()]
        self._sent = [frame for frame in self._sent if not frame.expired()]
        self.frames.left_received, self.frames.left_sent = len(self._received), len(self._sent)
        return self.frames


def wide_stage(stage: int) -> nn.Module:
    """As in the other tests, and wide enough for frames beyond the first receive."""
    return make_stage(stage, width=64)


def count_frames(context: RankContext, schedule: str, num_microbatches: int) -> Frames:
    """Train two steps over gloo."""
    transport = transport_of(context, "gloo")
    counter = FrameCounter(transport)
    train_two_steps(transport, schedule, num_microbatches)
    return counter.count()


def count_slots(context: RankContext, schedule: str, num_microbatches: int) -> tuple[int, int]:
    """Train two steps in shared memory: how many slots for large frames were in use at most, and are still."""
    transport = transport_of(context, "shared")
    most = 0
    boxes: list[Outbox] = []
    send = Outbox.send

    def counting(box: Outbox, number: int, slot: int, num_bytes: int) -> None:
        nonlocal most
        send(box, number, slot, num_bytes)
        if num_bytes > FIRST_CAPACITY:
            boxes.append(box)
            most = max(most, num_used(box))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outbox, "send", counting)
        train_two_steps(transport, schedule, num_microbatches)
    context.transport.gather(b"")  # by now all ranks have taken and released everything
    return most, max(map(num_used, boxes), default=0)


def num_used(box: Outbox) -> int:
    """Slots that hold a frame which was sent and not released."""
    return sum(arena.flag(slot) != FREE for arena in box.arenas.values() for slot in range(len(arena)))


def train_two_steps(transport: GlooTransport, schedule: str, num_microbatches: int) -> None:
    """On frames beyond the first receive."""
    with Pipeline(
        wide_stage,
        schedule=schedule,
        num_microbatches=num_microbatches,
        loss_fn=squared_error,
        optimizer=momentum,
        transport=transport,
    ) as pipe:
        for step in range(2):
            pipe.train_step(*make_batch(8 * num_microbatches, step, width=64))


def interleave(context: RankContext, kind: str) -> list[list[int]]:
    """Two transports of one group, each with a message of its own in flight; what rank 1 took from each."""
    transports = transport_of(context, kind), transport_of(context, kind)
    channel = Channel(0, 1, "activation")
    messages = [torch.arange(3), torch.arange(10_000)]
    receipts = []
    for transport, message in zip(transports, messages):
        transport.begin(Session(fixed_shapes=False))
        if context.rank == 0:
            transport.send(channel, pack(message, "stage 0"), 1, 0)
        else:
            receipts.append(transport.post(channel, 1, 0))
    taken = [receipt.wait().tensors[0].tolist() for receipt in reversed(receipts)]
    for transport in transports:
        transport.end()
    return taken


def begin_in_flight(context: RankContext, kind: str) -> str:
    """Begin a run while a message of another is still awaited; what rank 1 is told."""
    transport = transport_of(context, kind)
    told = ""
    channel = Channel(0, 1, "activation")
    transport.begin(Session(fixed_shapes=False))
    if context.rank == 0:
        transport.send(channel, pack(torch.arange(3), "stage 0"), 1, 0)
        transport.end()
    else:
        receipt = transport.post(channel, 1, 0)
        try:
            transport.begin(Session(fixed_shapes=False))
        except ValueError as error:
            told = str(error)
        receipt.wait()
        transport.begin(Session(fixed_shapes=False))
    return told


def talk(context: RankContext, pretended_hosts: bool) -> tuple[list[int], Tensor | None]:
    """The ranks that this one shares memory with, and what rank 1 receives of rank 0."""
    with pytest.MonkeyPatch.context() as patch:
        if pretended_hosts:
            patch.setattr(neighbourhood, "this_host", lambda *_: f"host {context.rank // 2}")
        transport = transport_of(context, "shared")
    channel = Channel(0, 2, "activation")
    transport.begin(Session(fixed_shapes=False))
    if context.rank == 0:
        transport.send(channel, pack(torch.arange(3), "stage 0"), 2, 0)
    received = transport.post(channel, 2, 0).wait().tensors[0].clone() if context.rank == 2 else None
    transport.end()
    return sorted(transport._neighbours), received
