"""SIGTERM of a process that has started ranks: passed on to these, which end in good order, and this one with them."""

import multiprocessing as mp
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Final

# How often to look for ranks that were started since the signal came.
_LOOK_SECONDS: Final = 0.2


@contextmanager
def sigterm_for_ranks() -> Iterator[None]:
    """Let SIGTERM reach the ranks that this process starts in the block, and not end this process itself.

    They are born with the signal held back, so that one that comes early waits until they listen.
    """
    messenger = _Messenger()
    resource_tracker.ensure_running()  # which ends with SIGTERM let in, so before it is held back
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    messenger.start()
    previous = signal.signal(signal.SIGTERM, messenger.note)  # for threads that were there before, and let it in
    try:
        yield
    finally:
        messenger.stop()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGTERM, previous)


class _Messenger:
    """A thread that waits for the signal and passes it on to each rank once, also to those that start later."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stagewright SIGTERM", daemon=True)

    def start(self) -> None:
        """Wait from now on; the signal is held back in this thread, and so in that one."""
        self._thread.start()

    def note(self, *_: object) -> None:
        """The signal has come, or is to be waited for no longer."""
        assert self._thread.ident is not None, "it was started"
        signal.pthread_kill(self._thread.ident, signal.SIGTERM)

    def stop(self) -> None:
        """Pass on nothing more."""
        self._is_over.set()
        if self._thread.is_alive():
            self.note()
        self._thread.join()

    def _run(self) -> None:
        signal.sigwait({signal.SIGTERM})
        told: set[int | None] = set()
        while not self._is_over.is_set():
            for process in mp.active_children():
                if process.pid not in told:
                    told.add(process.pid)
                    with suppress(ValueError):  # it was closed meanwhile
                        process.terminate()
            self._is_over.wait(_LOOK_SECONDS)
