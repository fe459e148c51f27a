"""Gloo: ranks as processes that exchange frames, over a torch.distributed process group or in shared memory."""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.engine.control.channel import Control
from stagewright.engine.control.progress import Progress
from stagewright.engine.errors import PeerError, returned
from stagewright.engine.transport.contract import OCCUPIED, Channel, Line, Receipt, Session, Transport
from stagewright.engine.transport.frame import FrameCodec
from stagewright.engine.transport.gloo_line import GlooLine
from stagewright.engine.transport.neighbourhood import connect_neighbours
from stagewright.engine.transport.shared import SharedLine
from stagewright.engine.value import Packed, pack

# Others look whether a rank waits for too long (see ``control``); a time-out of gloo's own names whoever comes next.
_NO_END: Final = timedelta(days=365)
_AT_ONCE: Final = timedelta(milliseconds=1)
# No channel has a tag as high as this.
_HIGHEST_TAG: Final = 2**31 - 1


class GlooTransport:
    """Frames between processes; one block of bytes a message, nothing pickled.

    Ranks on different hosts exchange them over gloo, those on one host through memory that they share.

    Args:
        group: the process group of the pipeline's ranks; the default group where left out.
        device: where the tensors live; those of a GPU travel through pinned host memory and gloo, which also serves
            ranks that share one GPU.
        shares_memory: whether ranks on one host do; all ranks say the same.
        is_watched: whether the ranks learn of each other's failures over a channel of its own; all say the same.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        *,
        shares_memory: bool = True,
        is_watched: bool = True,
    ) -> None:
        self.group = group or dist.distributed_c10d._get_default_group()
        self.rank: int = self.group.rank()
        self.num_ranks: int = self.group.size()
        self.device = device or torch.device("cpu")
        self.baton: AbstractContextManager[object] = nullcontext()
        self.codec = FrameCodec(self.device)
        # Several transports of one group, made in one order on all ranks, keep apart by their number.
        self._number: int = self.group.get_group_store().add(f"stagewright transports of rank {self.rank}", 1)
        near = shares_memory and self.device.type == "cpu" and self.num_ranks > 1
        self._neighbours = connect_neighbours(self.group, self._number) if near else {}
        self._control = Control(self.group, self._number, self) if is_watched and self.num_ranks > 1 else None
        self.progress = Progress(self.rank) if self._control is None else self._control.progress
        for neighbour in self._neighbours.values():
            neighbour.control, neighbour.progress = self._control, self.progress
        self._lines: dict[Line, GlooLine | SharedLine] = {}
        self._num_gathers = 0
        self._failure: str | None = None
        for other in range(1, self.num_ranks):
            self.open([_gathering(0, other), _gathering(other, 0)])

    @property
    def host(self) -> Transport:
        """This one."""
        return self

    @property
    def failure(self) -> str | None:
        """Why the pipeline cannot go on, as soon as this is known, whatever the rank does meanwhile."""
        return self._failure if self._control is None else self._control.failure

    def set_timeout(self, seconds: float) -> None:
        """For the control channel; that of the process group where this is not called."""
        if self._control is not None:
            self._control.timeout = seconds

    def begin_batch(self) -> None:
        """Note it."""
        if self._control is not None:
            self._control.begin_batch()

    def drain(self) -> None:
        """Tell the others over the control channel."""
        if self._control is not None:
            self._control.drain()

    def open(self, channels: Sequence[Channel]) -> None:
        """Note the channels of this rank; all ranks are connected."""
        for channel in channels:
            if self.rank in (channel.source, channel.destination):
                self._line(channel)

    def begin(self, session: Session) -> None:
        """Start a run.

        Raises:
            PeerError: a rank has failed before.
            ValueError: another pipeline has something in flight here.
        """
        if self._failure is None and self.failure is not None:
            self.abort(self.failure)
            raise PeerError(self.failure)
        if self._failure is not None:
            raise PeerError(f"the pipeline cannot go on after a failure: {self._failure}")
        if any(line.num_awaited for line in self._lines.values()):
            raise ValueError(OCCUPIED)
        for line in self._lines.values():
            line.begin()

    def send(self, channel: Channel, packed: Packed, stage: int, microbatch: int) -> None:
        """Send one frame."""
        self._line(channel).send(packed, stage, microbatch)

    def post(self, channel: Channel, stage: int, microbatch: int) -> Receipt:
        """Post the receive of the next frame."""
        return self._line(channel).post(stage, microbatch)

    def end(self) -> None:
        """Wait for every send that needs this rank to arrive."""
        for line in self._lines.values():
            line.end()

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes: all to the first rank, and from there to all."""
        turn, self._num_gathers = self._num_gathers, (self._num_gathers + 1) % 2**31
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        first, others = 0, range(1, self.num_ranks)
        if self.rank == first:
            receipts = [self.post(_gathering(other, first), 0, turn) for other in others]
            letters = pack([own, *(receipt.wait().tensors[0] for receipt in receipts)], "the ranks", "data")
            for other in others:
                self.send(_gathering(first, other), letters, 0, turn)
        else:
            self.send(_gathering(self.rank, first), pack(own, f"rank {self.rank}", "data"), 0, turn)
            letters = self.post(_gathering(first, self.rank), 0, turn).wait()
        for line in self._lines.values():
            if line.channel.kind == "gather":
                line.end()
        return [bytes(letter.cpu().numpy().data) for letter in letters.tensors]

    def abort(self, reason: str) -> None:
        """Send the news in the place of the next message on every channel; the first reason counts."""
        if self._control is not None:
            self._control.tell(reason)
        self._tell(reason)

    def leave(self) -> None:
        """Send word in the place of the next message on every channel, and over the control channel."""
        if self._control is not None:
            self._control.leave()
        self._tell(returned(self.rank, self.progress.num_batches, self.progress.replica))

    def hear(self, pending: Collection[int], awaited: int | None) -> str | None:
        """What the control channel knows."""
        return None if self._control is None else self._control.hear(pending, awaited)

    def _tell(self, reason: str) -> None:
        if self._failure is not None or self.num_ranks == 1:
            return
        self._failure = reason
        for neighbour in self._neighbours.values():
            neighbour.tell(reason)
        for line in self._lines.values():
            line.tell(reason)
            line.see_off()

    def close(self) -> None:
        """Let what is on its way outlive this transport, which another pipeline may use again; the process group
        belongs to whoever made it.
        """
        for line in self._lines.values():
            line.see_off()

    def let_another_go_first(self, seconds: float) -> None:
        """Wait until another rank hangs up, or for so long."""
        if self._control is not None:
            self._control.let_another_go_first(seconds)

    def hang_up(self) -> None:
        """Let nobody wait for a neighbour any more; called by the thread of the control channel."""
        for neighbour in self._neighbours.values():
            neighbour.hang_up()

    def break_off(self) -> None:
        """Let nobody wait in gloo any more: after a time-out all operations of its group fail; called by that thread.

        There is no other way to wake a thread that waits there.
        """
        other = (self.rank + 1) % self.num_ranks
        with suppress(RuntimeError):
            self.group.recv([torch.empty(1, dtype=torch.uint8)], other, _HIGHEST_TAG).wait(_AT_ONCE)

    def put(self, data: Tensor, destination: int, tag: int) -> dist.Work:
        """Send bytes over gloo."""
        try:
            return self.group.send([data], destination, tag)
        except RuntimeError as error:
            self._lost(destination, error)

    def receive(self, data: Tensor, source: int, tag: int) -> dist.Work:
        """Post a receive of bytes over gloo."""
        try:
            return self.group.recv([data], source, tag)
        except RuntimeError as error:
            self._lost(source, error)

    def wait_for(self, work: dist.Work, other: int) -> None:
        """Block until something is sent to, or received from, another rank over gloo.

        Raises:
            PeerError: that rank has gone.
        """
        self.progress.await_rank(other)
        try:
            work.wait(_NO_END)
        except RuntimeError as error:
            self._lost(other, error)
        finally:
            self.progress.awaits_nobody()

    def _lost(self, other: int, error: RuntimeError) -> NoReturn:
        """Every RuntimeError of gloo, whatever it says, means that there is no way to go on with that rank."""
        detail = f" ({error})"
        reason = f"rank {other} has gone, or the connection to it{detail}"
        if self._control is not None:
            reason = self._control.reason(other, detail)
        self.abort(reason)
        raise PeerError(reason) from error

    def _line(self, channel: Channel) -> GlooLine | SharedLine:
        line = self._lines.get(channel.line)
        if line is None:
            neighbour = self._neighbours.get(channel.destination if channel.source == self.rank else channel.source)
            if neighbour is None:
                line = GlooLine(channel, self, self._number)
            else:
                line = SharedLine(channel, neighbour, self.codec, self.abort)
            self._lines[channel.line] = line
        line.channel = channel
        return line


def _gathering(source: int, destination: int) -> Channel:
    return Channel(source, destination, "gather")
