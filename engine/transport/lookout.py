"""Lookout: a thread that ends the wait of a device for a rank that has gone.

On a device a host only queues what is to be done. Behind a message that never comes everything waits for ever, and
the host with it as soon as it wants to see a number; nobody is left there to look what has become of the other ranks.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Final

from stagewright.engine.errors import PeerError

LOOK_SECONDS: Final = 0.5


class Lookout:
    """Looks, from time to time, for a reason why something that a device waits for will never come.

    Args:
        look: gives that reason, None while there is none; called from a thread. What it says twice running counts: of
            a rank that has done its part and returned, that part may still be on its way.
        release: lets the device go on, with whatever is in its memory; called once, from that thread.
        period: seconds from one look to the next.
    """

    def __init__(self, look: Callable[[], str | None], release: Callable[[], None], period: float) -> None:
        self._look, self._release = look, release
        self._period = period
        self._suspicion: str | None = None
        self._reason: str | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look from now on, as long as anybody holds on to this; if that has been said before, nothing changes."""
        if self._thread is None:
            arguments = (weakref.ref(self), self._stopped, self._period)
            self._thread = threading.Thread(target=_look_out, name="stagewright lookout", args=arguments, daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raise PeerError if what the device waited for will never come."""
        if self._reason is not None:
            raise PeerError(self._reason)

    def look(self) -> bool:
        """Look once: whether the wait is over."""
        suspicion, self._suspicion = self._suspicion, self._look()
        if suspicion is None or suspicion != self._suspicion:
            return False
        self._reason = suspicion
        self._release()
        return True

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()


def _look_out(lookout: "weakref.ref[Lookout]", stopped: threading.Event, period: float) -> None:
    while not stopped.wait(period):
        own = lookout()
        if own is None or own.look():
            return
        del own
