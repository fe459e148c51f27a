"""Under way: what one communicator has in its queue, and whether the device waits for it."""

from collections import deque
from collections.abc import Iterable

from stagewright.engine.transport.communicator import Ticket


class UnderWay:
    """The sends, or receives, of one line that were not seen to be done yet; a communicator does them in order.

    One thread queues and waits; others may ask at any time.
    """

    __slots__ = ("_num_queued", "_num_waited", "_tickets")

    def __init__(self) -> None:
        self._tickets: deque[tuple[int, Ticket]] = deque()
        self._num_queued = 0
        self._num_waited = 0

    @property
    def tickets(self) -> list[Ticket]:
        """In the order of the queue."""
        return [ticket for _, ticket in self._tickets.copy()]

    def add(self, tickets: Iterable[Ticket]) -> int:
        """Note what was queued, and return how many were by now."""
        for ticket in tickets:
            self._tickets.append((self._num_queued, ticket))
            self._num_queued += 1
        return self._num_queued

    def wait_up_to(self, count: int | None = None) -> None:
        """Note that whatever the device does next comes after so many of them; after all where left out."""
        self._num_waited = max(self._num_waited, self._num_queued if count is None else count)

    def let_go(self) -> list[Ticket]:
        """Those that are done, and are looked at no more."""
        done = []
        while self._tickets and self._tickets[0][1].is_completed():
            done.append(self._tickets.popleft()[1])
        return done

    @property
    def is_pending(self) -> bool:
        """Whether the other end has something left to do."""
        tickets = self.tickets
        return bool(tickets) and not tickets[-1].is_completed()

    @property
    def is_awaited(self) -> bool:
        """Whether the device cannot go on before the other end has done something."""
        first = next((index for index, ticket in self._tickets.copy() if not ticket.is_completed()), None)
        return first is not None and first < self._num_waited
