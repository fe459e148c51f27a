"""Ways to run a function in every rank: threads, the double of NCCL, processes that all tests share."""

import atexit
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Literal, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from nccl_double import transports_on_double

from stagewright.engine import RankContext, launch_local
from stagewright.engine.launch.context import context_of
from stagewright.engine.launch.threads import run_threads
from stagewright.engine.transport.gloo import GlooTransport
from stagewright.engine.transport.hub import Hub

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
        self._listener = Listener(("127.0.0.1", 0), backlog=2 * MAX_RANKS)
        self._error: BaseException | None = None
        self._of_ranks: dict[int, Connection] = {}
        self._thread = threading.Thread(target=self._launch, daemon=True)
        self._thread.start()
        connections = [self._listener.accept() for _ in range(MAX_RANKS)]
        try:
            self._of_ranks = dict(sorted((receive(connection), connection) for connection in connections))
        except EOFError:
            self._raise()

    @property
    def is_alive(self) -> bool:
        """Whether more can be run."""
        return self._thread.is_alive()

    def run(self, function: Callable[..., Any], num_ranks: int, args: tuple[Any, ...]) -> list[Any]:
        """Run a function in the first ranks, and raise what ``launch_local`` raises where one fails."""
        for connection in self._of_ranks.values():
            send(connection, (function, num_ranks, args))
        try:
            return [receive(self._of_ranks[rank]) for rank in range(num_ranks)]
        except (EOFError, ConnectionError):
            self._raise()

    def close(self) -> None:
        """Let the ranks go."""
        for connection in self._of_ranks.values():
            connection.close()
        self._thread.join()
        self._listener.close()

    def _raise(self) -> NoReturn:
        self._thread.join()
        self._listener.close()
        assert self._error is not None
        raise self._error

    def _launch(self) -> None:
        try:
            launch_local(serve, MAX_RANKS, args=(self._listener.address,))
        except BaseException as error:
            self._error = error
            for _ in range(0 if self._of_ranks else MAX_RANKS):  # nobody must wait for ranks that never come
                Client(self._listener.address).close()


def serve(context: RankContext, address: tuple[str, int]) -> None:
    """The life of a shared rank: run what comes, until nothing comes any more."""
    torch.set_num_threads(1)
    groups = {num_ranks: dist.new_group(list(range(num_ranks))) for num_ranks in range(1, MAX_RANKS + 1)}
    with Client(address) as connection:
        send(connection, context.rank)
        with suppress(EOFError):
            while True:
                function, num_ranks, args = receive(connection)
                if context.rank < num_ranks:
                    send(connection, function(context_of(GlooTransport(groups[num_ranks])), *args))


def send(connection: Connection, value: Any) -> None:
    """Plainly pickled, as ``launch_local`` does it: every rank gets tensors of its own."""
    connection.send_bytes(pickle.dumps(value))


def receive(connection: Connection) -> Any:
    """The reverse of ``send``."""
    return pickle.loads(connection.recv_bytes())


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
