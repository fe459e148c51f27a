"""What ranks do to each other's messages; functions that processes can import."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from plain import make_batch, make_stage, momentum, squared_error
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from stagewright.engine import Pipeline, RankContext
from stagewright.engine.transport.contract import Channel, Receipt, Session
from stagewright.engine.transport.frame import FIRST_CAPACITY
from stagewright.engine.transport.gloo import GlooTransport
from stagewright.engine.value import Packed, pack

# One run on a channel: its depth, and the number of elements of each message.
Messages = tuple[int, Sequence[int]]


def numbers(run: int, index: int, size: int) -> Tensor:
    """What a message holds."""
    return torch.arange(size) + 1000 * run + index


def exchange(context: RankContext, runs: Sequence[Messages], seed: int) -> list[int]:
    """Rank 0 sends, rank 1 posts ahead and takes in a random order; returns what arrived wrong."""
    transport = context.transport
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
    return wrong


def gather_much(context: RankContext, sizes: Sequence[int]) -> list[list[bytes]]:
    """Every rank gives so many bytes of its own number, in turn; some give nothing."""
    own = bytes([context.rank])
    return [context.transport.gather(own * (size if context.rank % 2 else 2 * size)) for size in sizes]


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
    """Train two steps."""
    assert isinstance(context.transport, GlooTransport)
    counter = FrameCounter(context.transport)
    with Pipeline(
        wide_stage,
        schedule=schedule,
        num_microbatches=num_microbatches,
        loss_fn=squared_error,
        optimizer=momentum,
        transport=context.transport,
    ) as pipe:
        for step in range(2):
            pipe.train_step(*make_batch(8 * num_microbatches, step, width=64))
        return counter.count()


def interleave(context: RankContext) -> list[list[int]]:
    """Two transports of one group, each with a message of its own in flight; what rank 1 took from each."""
    assert isinstance(context.transport, GlooTransport)
    transports = context.transport, GlooTransport(context.transport.group)
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


def begin_in_flight(context: RankContext) -> str:
    """Begin a run while a message of another is still awaited; what rank 1 is told."""
    told = ""
    channel = Channel(0, 1, "activation")
    context.transport.begin(Session(fixed_shapes=False))
    if context.rank == 0:
        context.transport.send(channel, pack(torch.arange(3), "stage 0"), 1, 0)
        context.transport.end()
    else:
        receipt = context.transport.post(channel, 1, 0)
        try:
            context.transport.begin(Session(fixed_shapes=False))
        except ValueError as error:
            told = str(error)
        receipt.wait()
        context.transport.begin(Session(fixed_shapes=False))
    return told
