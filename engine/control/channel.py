"""Control: how the ranks of a pipeline learn that one of them has failed, beside the channels that carry its data.

Every process keeps one connection to each other rank, and one thread that listens to all of them. What it hears of:

* *news*: a rank has failed, and says at which instruction and why;
* a connection, or a process, that ends without a word: that rank has died. What it did last stands in its page of
  memory (see ``progress``), or where that is on another host, in what it has told every second;
* *leave*: a rank has returned in good order; who still waits for it some seconds later waits in vain;
* *drain*: a rank ends its batches; one that has begun a further batch, and will never get its data, says so;
* silence: a rank that has waited for longer than the time-out asks all others what they do and whom they wait for, and
  blames who does not answer, or the rank at the end of the chain (see ``silence``).

The first reason that a rank learns counts, and it tells all others. A rank that is blocked in its data is woken: its
sockets to neighbours are shut down, its gloo operations broken off. None of this costs a message or an instruction.
"""

import sys
import threading
import weakref
from collections.abc import Collection
from contextlib import suppress
from time import monotonic, sleep
from typing import Final

import torch
import torch.distributed as dist

from stagewright.engine.control.links import connect_links
from stagewright.engine.control.listening import Sleeper, Watch
from stagewright.engine.control.progress import Progress
from stagewright.engine.errors import described

# How long data may be quiet before what is known of a rank is looked for elsewhere.
_REASON_SECONDS: Final = 3.0


class Control:
    """One rank's end of the channel; it ends when this rank leaves, or nobody holds on to it any more.

    Args:
        group: the processes of a pipeline.
        number: tells this one from others of the same group.
        sleeper: is woken when a rank has failed.
    """

    def __init__(self, group: dist.ProcessGroup, number: int, sleeper: Sleeper) -> None:
        self.progress = Progress(group.rank(), shared=True)
        links = connect_links(group, number, self.progress)
        self._watch = Watch(group.rank(), links, self.progress, weakref.ref(sleeper))
        with suppress(RuntimeError, AttributeError):  # a group of a kind that says nothing of it
            self._watch.timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        self._thread = threading.Thread(target=self._watch.run, name="stagewright control", daemon=True)
        self._thread.start()
        # Also where nobody closes it: when the transport is dropped, or the interpreter ends.
        self._end = weakref.finalize(self, _end, self._watch, self._thread)

    @property
    def failure(self) -> str | None:
        """The first reason why the pipeline cannot go on."""
        return self._watch.failure

    @property
    def timeout(self) -> float:
        """Seconds without progress after which a rank that waits asks who keeps it waiting."""
        return self._watch.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._watch.timeout = seconds
        self._watch.stir()

    def tell(self, reason: str) -> None:
        """This rank has failed, or passes on that another one has."""
        self._watch.has_noticed = True
        self._watch.fail(reason)

    def leave(self) -> None:
        """This rank needs nothing more, and gives nothing more; the thread ends."""
        self._end()

    def begin_batch(self) -> None:
        """This rank begins one more batch."""
        self._watch.begin_batch()

    def drain(self) -> None:
        """This rank ends all that is in flight before it begins another batch."""
        self._watch.drain()

    def hear(self, pending: Collection[int], awaited: int | None) -> str | None:
        """Why nothing comes from some ranks any more: any rank has failed, or one of these has left; else None.

        Args:
            pending: the ranks in question.
            awaited: the one that this rank's device waits for, of which the rank itself knows nothing.
        """
        self._watch.awaited_by_device = awaited
        if self._watch.failure is not None:
            return self._watch.failure
        return next((left for other in pending if (left := self._watch.has_left(other)) is not None), None)

    def let_another_go_first(self, seconds: float) -> None:
        """Wait until another rank hangs up, as it does at its very end, or for so long."""
        deadline = monotonic() + seconds
        while not self._watch.has_lost_one and monotonic() < deadline:
            sleep(0.01)

    def reason(self, other: int, detail: str = "") -> str:
        """Why there is no way to go on with another rank; waits a moment for those that may know more.

        Args:
            other: it.
            detail: what is known where it was missed.
        """
        self._watch.has_noticed = True
        deadline = monotonic() + _REASON_SECONDS
        while self._watch.failure is None and monotonic() < deadline:
            if (left := self._watch.has_left(other)) is not None:
                return left
            sleep(0.01)
        return self._watch.failure or f"rank {other}{self.progress.replica} has gone, or the connection to it{detail}"


def _end(watch: "Watch", thread: threading.Thread) -> None:
    """Without a reference to the control itself, so that it can be dropped."""
    error = getattr(sys, "last_value", None)  # what the interpreter has just printed before it ends
    if error is not None and not watch.has_noticed:
        watch.fail(f"{watch.progress.name} failed {watch.progress.place}: {described(error)}")
    watch.leave()
    watch.stop()
    if thread is not threading.current_thread():
        thread.join()
