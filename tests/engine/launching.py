"""Ways to run a function in every rank: threads, the double of NCCL, processes that all tests share."""

import atexit
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from nccl_double import transports_on_double

from stagewright.engine import RankContext, launch_local
from stagewright.engine.context import context_of
from stagewright.engine.launch_threads import run_threads
from stagewright.engine.transport.gloo import GlooTransport
from stagewright.engine.transport.threads import Hub

Kind: TypeAlias = Literal["threads", "double", "gloo"]

MAX_RANKS = 4


def launch_on(kind: Kind, function: Callable[..., Any], num_ranks: int, args: tuple[Any, ...] = ()) -> list[Any]:
    """Run ``function(context, *args)`` in every rank and return what each returned, in the order of ranks.

    Args:
        kind: ``threads``; ``double``: threads that exchange tensors by NCCL's rules; ``gloo``: processes, which are
            started once and shared by all tests, so the function must be importable and leave nothing behind.
        function, num_ranks, args: as for ``launch_local``; at most four ranks for ``gloo``.
    """
    match kind:
        case "threads":
            return launch_local(function, num_ranks, backend="threads", args=args)
        case "double":
            hub = Hub(num_ranks)
            return run_threads(function, hub, transports_on_double(hub), args)
        case "gloo":
            return shared_processes().run(function, num_ranks, args)


class SharedProcesses:
    """Ranks that wait for work: one ``launch_local`` for many functions. A failing function ends them."""

    def __init__(self) -> None:
        self._listener = Listener(("127.0.0.1", 0))
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._launch, daemon=True)
        self._thread.start()
        connections = [self._listener.accept() for _ in range(MAX_RANKS)]
        self._of_ranks = dict(sorted((connection.recv(), connection) for connection in connections))

    @property
    def is_alive(self) -> bool:
        """Whether more can be run."""
        return self._thread.is_alive()

    def run(self, function: Callable[..., Any], num_ranks: int, args: tuple[Any, ...]) -> list[Any]:
        """Run a function in the first ranks, and raise what ``launch_local`` raises where one fails."""
        ranks = list(self._of_ranks.values())[:num_ranks]
        for connection in self._of_ranks.values():
            connection.send((function, num_ranks, args))
        try:
            return [connection.recv() for connection in ranks]
        except (EOFError, ConnectionError):
            self._thread.join()
            assert self._error is not None
            raise self._error from self._error.__cause__

    def close(self) -> None:
        """Let the ranks go."""
        for connection in self._of_ranks.values():
            connection.close()
        self._thread.join()
        self._listener.close()

    def _launch(self) -> None:
        try:
            launch_local(serve, MAX_RANKS, args=(self._listener.address,))
        except BaseException as error:
            self._error = error


def serve(context: RankContext, address: tuple[str, int]) -> None:
    """The life of a shared rank: run what comes, until nothing comes any more."""
    torch.set_num_threads(1)
    groups = {num_ranks: dist.new_group(list(range(num_ranks))) for num_ranks in range(1, MAX_RANKS + 1)}
    with Client(address) as connection:
        connection.send(context.rank)
        while (work := next_work(connection)) is not None:
            function, num_ranks, args = work
            if context.rank < num_ranks:
                connection.send(function(context_of(GlooTransport(groups[num_ranks])), *args))


def next_work(connection: Connection) -> Any:
    """What to run next, None at the end."""
    try:
        return connection.recv()
    except EOFError:
        return None


class _Pool:
    """The shared processes, as soon as a test wants them."""

    processes: SharedProcesses | None = None


def shared_processes() -> SharedProcesses:
    """Processes that are started at the first call, and again after a failure."""
    if _Pool.processes is None:
        atexit.register(end_shared_processes)
    if _Pool.processes is None or not _Pool.processes.is_alive:
        _Pool.processes = SharedProcesses()
    return _Pool.processes


def end_shared_processes() -> None:
    """End them, if there are any."""
    if _Pool.processes is not None and _Pool.processes.is_alive:
        _Pool.processes.close()
    _Pool.processes = None
