"""Preemption: SIGTERM as the wish that a training ends in good order, on all ranks after the same step."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from stagewright.engine.errors import PeerError
from stagewright.engine.transport.contract import Transport
from stagewright.engine.transport.gloo import GlooTransport

_GO_ON: Final = "go on"
_END: Final = "end"
# Decisions that are still in the store: no rank is nearly as many steps ahead of another.
_NUM_KEPT: Final = 64


class Decisions:
    """After which step a training ends. Nobody waits: whichever rank is the first to have made a step decides for all.

    Args:
        store: of all ranks.
        name: of what is decided in that store.
        tidies: whether this rank removes what nobody asks for any more; one rank does.
    """

    def __init__(self, store: Store, name: str, *, tidies: bool) -> None:
        self._store, self._name, self._tidies = store, name, tidies

    def ends_after(self, step: int, *, wanted: bool) -> bool:
        """Whether the training ends after a step, the same on every rank.

        Args:
            step: that this rank has just made; every rank asks after every step.
            wanted: whether this rank wants it to end, if not now, then as soon as may be.

        Raises:
            PeerError: whoever keeps the store has gone.
        """
        try:
            if self._tidies:
                self._store.delete_key(self._key(step - _NUM_KEPT))
            ends = self._decide(step, _END if wanted else _GO_ON) == _END
            while wanted and not ends and self._decide(step + 1, _END) != _END:
                step += 1  # some rank has made that one too
        except RuntimeError as error:
            raise PeerError(f"whoever keeps the store of all ranks has gone ({error})") from error
        return ends

    def _decide(self, step: int, wish: str) -> str:
        """What is decided: the first wish counts."""
        return self._store.compare_set(self._key(step), "", wish).decode()

    def _key(self, step: int) -> str:
        return f"{self._name} {step}"


class Preemption:
    """Context in which SIGTERM, by which a machine is taken away, ends a training in good order.

    In it SIGTERM does not end the process. It makes ``ends_after`` true: on all ranks after the same step, whichever of
    them were told, so that all can save and return::

        with Preemption(context.transport) as preemption:
            for step in range(num_steps):
                pipe.train_step(*batch(step))
                if preemption.ends_after(step):
                    checkpoints.save()
                    break

    The ranks do not wait for each other: a step costs one question to the store of the process group. The training ends
    with the step that is under way when SIGTERM comes; with the next one where a rank has finished that already.

    Args:
        transport: of all ranks of the training; processes, for threads get no signals.

    Raises:
        ValueError: the ranks are threads.
    """

    def __init__(self, transport: Transport) -> None:
        host = transport.host
        if isinstance(host, GlooTransport):
            store: Store = host.group.get_group_store()
        elif transport.num_ranks == 1:
            store = HashStore()
        else:
            raise ValueError("only processes can be told to end by SIGTERM: these ranks are threads of one")
        number = store.add(f"stagewright preemptions of rank {transport.rank}", 1)
        self._decisions = Decisions(store, f"stagewright preemption {number}", tidies=transport.rank == 0)
        self._previous: Callable[[int, FrameType | None], Any] | int | None = None
        self.is_wanted = False

    def ends_after(self, step: int) -> bool:
        """Whether the training ends after a step; every rank asks after every step, in order.

        Raises:
            PeerError: whoever keeps the store of the ranks has gone.
        """
        return self._decisions.ends_after(step, wanted=self.is_wanted)

    def __enter__(self) -> "Preemption":
        self._previous = signal.signal(signal.SIGTERM, self._note)
        # Whoever has started this process may have held the signal back until somebody listens.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_wanted = True
