"""Communicator: what a device transport needs of whatever connects devices, and of the hosts beside them."""

from collections.abc import Collection
from typing import Protocol

from torch import Tensor

from stagewright.engine.transport.contract import Line, Transport


class Ticket(Protocol):
    """A send or receive that was put into a communicator's queue; it keeps its memory alive until it is done."""

    def wait(self) -> object:
        """Let whatever the device does next come after it; the host need not wait."""
        ...

    def is_completed(self) -> bool:
        """Whether it is done."""
        ...


class Communicator(Protocol):
    """One direction between two ranks: operations in order, sizes exact, no tags."""

    def send(self, data: Tensor) -> Ticket:
        """Put a send of bytes into the queue."""
        ...

    def receive(self, data: Tensor) -> Ticket:
        """Put a receive of exactly these bytes into the queue."""
        ...

    def abort(self) -> None:
        """End at once what this end has in the queue; whatever waits for that goes on, and finds anything in memory."""
        ...


class Connect(Protocol):
    """Makes the communicators of a rank."""

    def __call__(self, line: Line) -> Communicator | None:
        """The communicator of a line, or None where this rank is at neither end; every rank calls this alike."""
        ...


class Host(Transport, Protocol):
    """A transport between hosts; it knows what becomes of other ranks without being told in the place of a message."""

    def hear(self, pending: Collection[int], awaited: int | None) -> str | None:
        """Why nothing comes from some ranks any more; None while nothing speaks against it.

        Called from time to time, from a thread of its own. Any rank may have failed, or one of these have returned.

        Args:
            pending: ranks that have something left to do for this one's device.
            awaited: the one of them for which it waits; None where it does not.
        """
        ...
