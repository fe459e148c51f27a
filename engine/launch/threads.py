"""Launch, threads: the ranks of a pipeline as threads of this process."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from stagewright.engine.errors import PeerError, RankError
from stagewright.engine.launch.context import RankContext, context_of, tell_end
from stagewright.engine.transport.contract import Transport
from stagewright.engine.transport.hub import Hub

# How often a thread that does not end is looked at.
_LOOK_SECONDS: Final = 0.5


def run_threads(
    function: Callable[..., Any], hub: Hub, transports: Sequence[Transport], args: tuple[Any, ...]
) -> list[Any]:
    """Run ``function(context, *args)`` in a thread a rank and return what each returned, in the order of ranks.

    Args:
        function: gets a RankContext.
        hub: where the ranks learn that another one has failed or returned.
        transports: one a rank.
        args: further arguments of the function.

    Raises:
        Exception: what the first failing rank raised. It is raised once all ranks have ended: one that waits for
            another is woken, one that computes gets to its next message first.
    """
    failures: list[BaseException] = []
    ranks = [_ThreadRank(function, context_of(transport), args, failures) for transport in transports]
    threads = [
        threading.Thread(target=rank.run, name=f"stagewright rank {rank.context.rank}", daemon=True) for rank in ranks
    ]
    for thread in threads:
        thread.start()
    try:
        _join(threads, hub)
    except BaseException:
        hub.fail("the launcher was interrupted")
        _join(threads, hub)
        raise
    if failures:
        raise next((error for error in failures if not isinstance(error, PeerError)), failures[0])
    return [rank.result for rank in ranks]


class _ThreadRank:
    """One rank as a thread.

    Args:
        function, args: what to run.
        context: of this rank.
        failures: the errors of all ranks, in the order in which they were raised.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        context: RankContext,
        args: tuple[Any, ...],
        failures: list[BaseException],
    ) -> None:
        self.context = context
        self.result: Any = None
        self._function, self._args = function, args
        self._failures = failures

    def run(self) -> None:
        """Run the function, and tell the others that it has ended or failed."""
        rank = self.context.rank
        try:
            self.result = self._function(self.context, *self._args)
            self.context.transport.leave()
        except BaseException as error:
            self._failures.append(error if isinstance(error, Exception) else _as_rank_error(rank, error))
            tell_end(self.context.transport, error)


def _join(threads: Sequence[threading.Thread], hub: Hub) -> None:
    """Wait for all ranks but those that do not go on, and cannot be ended: these are given up."""
    for rank, thread in enumerate(threads):
        while thread.is_alive() and rank not in hub.stuck:
            thread.join(_LOOK_SECONDS)


def _as_rank_error(rank: int, error: BaseException) -> RankError:
    """What ends a program or an interpreter must not pass for the launcher's own end."""
    failure = RankError(f"rank {rank} ended with {type(error).__name__}({error})")
    failure.__cause__ = error
    return failure
