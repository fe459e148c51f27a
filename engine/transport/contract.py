"""The contract of a transport: what the executor needs of whatever connects the ranks."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeAlias, get_args

import torch

from stagewright.engine.control.progress import Progress
from stagewright.engine.value import Layout, Packed

Kind: TypeAlias = Literal["activation", "gradient", "replica", "tied", "gather", "scalars"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

# source, destination, kind: what tells one channel from another
Line: TypeAlias = tuple[int, int, Kind]

# Why a run cannot begin.
OCCUPIED: Final = (
    "another pipeline has microbatches in flight on this transport: call its flush() before, or give each pipeline a "
    "transport of its own"
)


@dataclass(frozen=True, slots=True)
class Channel:
    """A one-way line between two ranks, on which messages keep their order.

    Args:
        source, destination: the ranks.
        kind: what it carries: activations, gradients, the weight gradients of replicated or tied stages, or what the
            ranks tell each other.
        depth: before a message is posted, all that precede it by ``depth`` or more have been consumed; so no more
            than this many receive buffers are ever alive.
    """

    source: int
    destination: int
    kind: Kind
    depth: int = 1

    @property
    def line(self) -> Line:
        """The channel without its depth."""
        return self.source, self.destination, self.kind


@dataclass(slots=True)
class Session:
    """What a transport may remember from one run of a program to the next.

    Args:
        fixed_shapes: a message of one run has the layout that it had in the first.
        num_microbatches: of one batch, where microbatches count on from batch to batch; those of later batches have the
            layouts of the first one's.
        layouts: those layouts, by line, stage and microbatch, and which message of its line told each.
        num_messages: so many were sent or posted on each line.
    """

    fixed_shapes: bool
    num_microbatches: int | None = None
    layouts: dict[tuple[Line, int, int], tuple[int, Layout]] = field(default_factory=dict)
    num_messages: dict[Line, int] = field(default_factory=dict)


class Receipt(Protocol):
    """A receive that was posted."""

    def wait(self) -> Packed:
        """Block until the message is there and return it."""
        ...


class Transport(Protocol):
    """Connects the ranks of one pipeline.

    Sends return at once. The k-th send of a channel meets its k-th posted receive; receives may be waited for
    in any order. Both ends of a channel give the same ``depth``.
    """

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the tensors of this rank live."""
        ...

    @property
    def baton(self) -> AbstractContextManager[object]:
        """Held while computing where ranks share one process, and with it one random generator."""
        ...

    @property
    def host(self) -> "Transport":
        """The transport that carries small things from host to host: this one itself, where tensors live there too."""
        ...

    @property
    def progress(self) -> Progress:
        """Where this rank is in its program, for the others to see."""
        ...

    def set_timeout(self, seconds: float) -> None:
        """After so many seconds without progress a rank that waits finds out who keeps it waiting, and fails."""
        ...

    def begin_batch(self) -> None:
        """Note that this rank begins one more batch, where batches follow each other without a flush."""
        ...

    def drain(self) -> None:
        """Let the others know that this rank ends the batches in flight before it begins another."""
        ...

    def open(self, channels: Sequence[Channel]) -> None:
        """Make ready the channels of a program, those of all ranks; every rank calls this alike."""
        ...

    def begin(self, session: Session) -> None:
        """Start one run of a program; nothing of an earlier one is on its way any more."""
        ...

    def send(self, channel: Channel, packed: Packed, stage: int, microbatch: int) -> None:
        """Send a message for a stage's microbatch."""
        ...

    def post(self, channel: Channel, stage: int, microbatch: int) -> Receipt:
        """Post the receive of the next message on a channel."""
        ...

    def end(self) -> None:
        """Wait until all that was sent has been taken."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in the order of ranks; called by all ranks alike."""
        ...

    def abort(self, reason: str) -> None:
        """Tell the other ranks, where that is possible, that this one has failed and why."""
        ...

    def leave(self) -> None:
        """Tell the other ranks that this one has returned, in good order: who waits for it does so in vain."""
        ...

    def close(self) -> None:
        """Release what the transport holds; nothing is sent afterwards."""
        ...
