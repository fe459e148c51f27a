"""Device: tensors straight from device to device over communicators that know neither tags nor sizes.

A communicator, as NCCL has them, takes sends and receives in order and needs the exact size of each. So a message
travels as its bare tensors on a communicator of its channel's own, and its layout from host to host: in the first
run of a program only, where shapes stay fixed, else with every message.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import Tensor

from stagewright.engine.control.progress import Progress
from stagewright.engine.transport.communicator import Communicator, Connect, Host, Ticket
from stagewright.engine.transport.contract import Channel, Line, Receipt, Session, Transport
from stagewright.engine.transport.lookout import LOOK_SECONDS, Lookout
from stagewright.engine.transport.under_way import UnderWay
from stagewright.engine.value import Layout, Packed, pack
from stagewright.engine.writing import read_layout, write_layout

# Which message: its line, stage and microbatch.
Key: TypeAlias = tuple[Line, int, int]


class DeviceTransport:
    """Tensors over one communicator a channel, layouts over the host.

    While anything is under way, a lookout sees to it that the device does not wait for a rank that has gone: its
    communicators are then ended, and the next call raises PeerError.

    Args:
        host: carries layouts and other small things between the hosts.
        connect: makes communicators.
        device: where the tensors live.
        period: seconds from one look of the lookout to the next.
    """

    def __init__(self, host: Host, connect: Connect, device: torch.device, *, period: float = LOOK_SECONDS) -> None:
        self.rank = host.rank
        self.num_ranks = host.num_ranks
        self.device = device
        self.baton: AbstractContextManager[object] = host.baton
        self._host = host
        self._connect = connect
        self._communicators: dict[Line, Communicator | None] = {}
        self._unposted: dict[Line, deque[_DeviceReceipt]] = {}
        self._session = Session(fixed_shapes=False)
        self._num_taken: dict[Line, int] = {}  # on each line, when the run began
        self._under_way: dict[Line, UnderWay] = {}
        self._lookout = Lookout(self._look, self._release, period)

    @property
    def host(self) -> Transport:
        """The one that carries layouts."""
        return self._host

    @property
    def progress(self) -> Progress:
        """The host's."""
        return self._host.progress

    def set_timeout(self, seconds: float) -> None:
        """The host looks."""
        self._host.set_timeout(seconds)

    def begin_batch(self) -> None:
        """The host notes it."""
        self._host.begin_batch()

    def drain(self) -> None:
        """Tell the other hosts."""
        self._host.drain()

    def open(self, channels: Sequence[Channel]) -> None:
        """Make the communicators that are missing, in one order on all ranks."""
        self._host.open(channels)
        for line in sorted({channel.line for channel in channels}):
            if line not in self._communicators:
                self._communicators[line] = self._connect(line)
                self._unposted[line] = deque()
                self._under_way[line] = UnderWay()

    def begin(self, session: Session) -> None:
        """Start one run; layouts that the session knows are not sent again.

        Raises:
            PeerError: a rank has failed before.
            ValueError: another pipeline has something in flight here.
        """
        self._lookout.check()
        self._host.begin(session)
        self._session = session
        self._num_taken = dict(session.num_messages)
        if self.num_ranks > 1:
            self._lookout.start()

    def send(self, channel: Channel, packed: Packed, stage: int, microbatch: int) -> None:
        """Queue a message's tensors; before them its layout, where the other side cannot know it."""
        key = self._key(channel, stage, microbatch)
        index = self._count(channel)
        _, layout = self._session.layouts.get(key, (0, packed.layout))
        if layout != packed.layout:
            raise ValueError(
                f"what crosses keeps its shapes after the first step: microbatch {microbatch} of stage {stage} got "
                f"{_described(layout)} then, and {_described(packed.layout)} now; give the Pipeline dynamic_shapes=True"
            )
        if self._known(channel, key, index) is None:
            text = torch.frombuffer(bytearray(write_layout(packed.layout)), dtype=torch.uint8)
            self._host.send(channel, pack(text, "a message", "layout"), stage, microbatch)
            self.learn(key, index, packed.layout)
        communicator = self._communicator(channel)
        self._lookout.check()
        under_way = self._under_way[channel.line]
        under_way.add(communicator.send(_as_bytes(tensor)) for tensor in packed.tensors if tensor.numel())
        for done in under_way.let_go():  # what has gone out is released, without waiting for the rest
            done.wait()

    def post(self, channel: Channel, stage: int, microbatch: int) -> Receipt:
        """Queue the receives of a message, at once where its layout is known, else when it is waited for."""
        key = self._key(channel, stage, microbatch)
        index = self._count(channel)
        layout = self._known(channel, key, index)
        source = None if layout is not None else self._host.post(channel, stage, microbatch)
        receipt = _DeviceReceipt(self, channel, key, index, layout, source)
        unposted = self._unposted[channel.line]
        unposted.append(receipt)
        if layout is not None and len(unposted) == 1:
            self.post_up_to(channel.line, receipt)
        return receipt

    def post_up_to(self, line: Line, receipt: "_DeviceReceipt") -> None:
        """Queue the receives of a line up to this one, in order: a communicator knows no tags."""
        unposted = self._unposted[line]
        while unposted and not receipt.is_posted:
            unposted.popleft().queue()

    def end(self) -> None:
        """Let whatever comes next come after all sends."""
        self._host.end()
        for (source, _, _), under_way in self._under_way.items():
            if source == self.rank:
                under_way.wait_up_to()
                for ticket in under_way.tickets:
                    self._wait_for(ticket)
            under_way.let_go()  # what is not done stays in the lookout's view

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, from host to host."""
        return self._host.gather(data)

    def abort(self, reason: str) -> None:
        """Tell the other ranks, and let this one's device wait for none of them any more."""
        self._host.abort(reason)
        if self._pending():
            self._release()

    def leave(self) -> None:
        """Tell the other ranks."""
        self._host.leave()

    def close(self) -> None:
        """Look out no more; communicators are made once for all programs, and end with whatever made them."""
        self._lookout.stop()
        self._host.close()

    def receive(self, channel: Channel, layout: Layout) -> tuple[list[Tensor], list[Ticket], int]:
        """Queue the receives of one message's tensors into new memory; also, how many were on its line by now."""
        self._lookout.check()
        communicator = self._communicator(channel)
        tensors = [
            torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in zip(layout.shapes, layout.dtypes)
        ]
        tickets = [communicator.receive(_as_bytes(tensor)) for tensor in tensors if tensor.numel()]
        under_way = self._under_way[channel.line]
        under_way.let_go()
        return tensors, tickets, under_way.add(tickets)

    def wait_for(self, line: Line, tickets: Sequence[Ticket], count: int) -> None:
        """Let whatever the device does next come after some receives, the last ones of so many on their line.

        Raises:
            PeerError: they will never be done.
        """
        self._under_way[line].wait_up_to(count)
        for ticket in tickets:
            self._wait_for(ticket)

    def learn(self, key: Key, index: int, layout: Layout) -> None:
        """Remember the layout that the index-th message of a line had, for later ones of its key."""
        if self._session.fixed_shapes:
            self._session.layouts.setdefault(key, (index, layout))

    def _wait_for(self, ticket: Ticket) -> None:
        try:
            ticket.wait()
        except RuntimeError:
            self._lookout.check()  # which says more than a communicator that was ended
            raise
        self._lookout.check()

    def _ranks(self, lines: Iterable[Line]) -> list[int]:
        """The other ends of some lines of this rank."""
        return sorted({destination if source == self.rank else source for source, destination, _ in lines})

    def _pending(self) -> list[int]:
        """The ranks that have something left to do for this one."""
        return self._ranks(line for line, under_way in list(self._under_way.items()) if under_way.is_pending)

    def _look(self) -> str | None:
        """From the lookout's thread."""
        awaited = self._ranks(line for line, under_way in list(self._under_way.items()) if under_way.is_awaited)
        return self._host.hear(self._pending(), awaited[0] if awaited else None)

    def _release(self) -> None:
        for communicator in self._communicators.values():
            if communicator is not None:
                communicator.abort()

    def _key(self, channel: Channel, stage: int, microbatch: int) -> Key:
        period = self._session.num_microbatches
        return channel.line, stage, microbatch if period is None else microbatch % period

    def _count(self, channel: Channel) -> int:
        """The number of the next message of a line, which both its ends count alike."""
        index = self._session.num_messages.get(channel.line, 0)
        self._session.num_messages[channel.line] = index + 1
        return index

    def _known(self, channel: Channel, key: Key, index: int) -> Layout | None:
        """The layout of a message, if both ends know it.

        The receiver has taken all messages of earlier runs, and those that came ``depth`` or more before this one.
        """
        told, layout = self._session.layouts.get(key, (index, None))
        return layout if told < max(index - channel.depth + 1, self._num_taken.get(channel.line, 0)) else None

    def _communicator(self, channel: Channel) -> Communicator:
        communicator = self._communicators[channel.line]
        assert communicator is not None, "a rank sends and receives on its own channels only"
        return communicator


class _DeviceReceipt:
    def __init__(
        self,
        transport: DeviceTransport,
        channel: Channel,
        key: Key,
        index: int,
        layout: Layout | None,
        source: Receipt | None,
    ) -> None:
        self._transport, self._channel, self._key, self._index = transport, channel, key, index
        self._layout, self._source = layout, source
        self._tensors: list[Tensor] = []
        self._tickets: list[Ticket] = []
        self._count = 0
        self.is_posted = False

    def queue(self) -> None:
        """Put the receives into the communicator's queue, once the layout is known."""
        if self._layout is None:
            assert self._source is not None, "a layout is either known or on its way"
            (text,) = self._source.wait().tensors
            self._layout = read_layout(bytes(text.numpy().data))
            self._transport.learn(self._key, self._index, self._layout)
        self._tensors, self._tickets, self._count = self._transport.receive(self._channel, self._layout)
        self.is_posted = True

    def wait(self) -> Packed:
        """The message; the device's next work comes after its arrival."""
        self._transport.post_up_to(self._channel.line, self)
        self._transport.wait_for(self._channel.line, self._tickets, self._count)
        assert self._layout is not None, "a posted receive has a layout"
        return Packed(self._layout, self._tensors)


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor as bytes: no communicator has to know its type."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    size = tensor.numel() * tensor.itemsize
    memory, start = tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory, start, (size,), (1,))


def _described(layout: Layout) -> str:
    """Types and shapes in one line."""
    tensors = [f"{dtype}{list(shape)}" for dtype, shape in zip(layout.dtypes, layout.shapes)]
    return ", ".join(tensors).replace("torch.", "") or "no tensor"
