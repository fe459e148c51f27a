"""Launch: run a function in every rank of a pipeline on this machine."""

import logging
import multiprocessing as mp
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from stagewright.engine.context import RankContext, context_of, num_cores
from stagewright.engine.errors import PeerError
from stagewright.engine.transport.gloo import GlooTransport
from stagewright.engine.transport.threads import Hub, ThreadTransport

logger = logging.getLogger(__name__)

# How long a rank may take to say what went wrong after another rank has died, and to end once asked to.
_GRACE_SECONDS: Final = 3.0


class RankError(RuntimeError):
    """A rank has died without raising anything, or has raised what could not be brought here as it was."""


def launch_local(
    function: Callable[..., Any],
    num_ranks: int,
    *,
    backend: Literal["gloo", "threads"] = "gloo",
    args: Sequence[Any] = (),
) -> list[Any]:
    """Run ``function(context, *args)`` in every rank and return what each returned, in the order of ranks.

    Args:
        function: gets a RankContext. For processes it must be importable, like everything it returns.
        num_ranks: ranks to run.
        backend: ``gloo``: a process each; ``threads``: all in this process, for tests and debugging.
        args: further arguments of the function.

    Raises:
        Exception: what the first failing rank raised, with that rank's traceback as its cause; by then no rank runs
            any more.
    """
    if num_ranks < 1:
        raise ValueError(f"a pipeline has at least one rank: got num_ranks={num_ranks}")
    match backend:
        case "gloo":
            return _Processes(function, num_ranks, tuple(args)).run()
        case "threads":
            return _run_threads(function, num_ranks, tuple(args))
        case _:
            raise ValueError(f"a backend is gloo or threads: got {backend!r}")


class _Processes:
    """One process a rank, and a pipe to each."""

    def __init__(self, function: Callable[..., Any], num_ranks: int, args: tuple[Any, ...]) -> None:
        context = mp.get_context("spawn")
        # The store lives here and not in a rank: its port is free for sure, and no dying rank takes it along.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            arguments = (function, rank, num_ranks, self._store.port, theirs, args)
            process = context.Process(
                target=_process_main, args=arguments, name=f"stagewright rank {rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self) -> list[Any]:
        """Wait for every rank; at the first failure, or an interrupt, end them all."""
        try:
            results = self._collect()
            for pipe in self._pipes:
                pipe.send("done")
            for process in self._processes:
                process.join(_GRACE_SECONDS)
            return results
        finally:
            self._end()

    def _collect(self) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            failures = []
            for pipe in wait(open_pipes):
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                outcome = self._receive(rank)
                if outcome[0] == "result":
                    results[rank] = outcome[1]
                else:
                    failures.append((rank, outcome[1], outcome[2]))
            if failures:
                self._raise(failures, set(results))
        return [results[rank] for rank in range(len(self._pipes))]

    def _receive(self, rank: int) -> tuple[str, Any, str]:
        try:
            outcome: tuple[str, Any, str] = self._pipes[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join(_GRACE_SECONDS)
            code = self._processes[rank].exitcode
            how = (
                f"was ended by signal {-code} ({signal.Signals(-code).name})"
                if code and code < 0
                else f"exited with code {code}"
            )
            return "error", RankError(f"rank {rank} {how} without raising an error"), ""
        return outcome

    def _raise(self, failures: list[tuple[int, BaseException, str]], finished: set[int]) -> None:
        """Raise the error that matters: a rank that only suffers from another's failure may report first."""
        known = finished | {rank for rank, _, _ in failures}
        while all(_is_consequence(error) for _, error, _ in failures):
            pending = [pipe for rank, pipe in enumerate(self._pipes) if rank not in known]
            ready = wait(pending, _GRACE_SECONDS) if pending else []
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                outcome = self._receive(rank)
                known.add(rank)
                if outcome[0] == "error":
                    failures.append((rank, outcome[1], outcome[2]))
        rank, error, text = next((failure for failure in failures if not _is_consequence(failure[1])), failures[0])
        if text:
            error.__cause__ = RankError(f"in rank {rank}:\n\n{text}")
        raise error

    def _end(self) -> None:
        """Leave no process behind."""
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        for process in self._processes:
            process.join(_GRACE_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()


def _is_consequence(error: BaseException) -> bool:
    """Whether an error is what a rank sees when another one has gone."""
    return isinstance(error, PeerError | dist.DistError) or (
        isinstance(error, RuntimeError) and not isinstance(error, RankError) and _GLOO_LOST in str(error)
    )


_GLOO_LOST: Final = "gloo"


def _process_main(
    function: Callable[..., Any], rank: int, num_ranks: int, port: int, pipe: Connection, args: tuple[Any, ...]
) -> None:
    """The life of one rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the launcher alone decides
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(max(1, num_cores() // num_ranks))
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(minutes=30))
        result = function(context_of(GlooTransport()), *args)
        pipe.send(("result", result, ""))
    except BaseException as error:
        pipe.send(("error", _portable(error), traceback.format_exc()))
    pipe.recv()  # stay until all are done, so that no neighbour loses a message
    dist.destroy_process_group()


def _follow_parent() -> None:
    """End this process when the launcher has gone, however it went."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _portable(error: BaseException) -> BaseException:
    """The error itself where it survives the way to the launcher, else one that says the same."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = None
    if type(copy) is type(error):
        return error
    portable = RankError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", ()):
        portable.add_note(note)
    return portable


def _run_threads(function: Callable[..., Any], num_ranks: int, args: tuple[Any, ...]) -> list[Any]:
    """All ranks as threads of this process."""
    hub = Hub(num_ranks)
    ranks = [_ThreadRank(function, context_of(ThreadTransport(hub, rank)), args) for rank in range(num_ranks)]
    threads = [threading.Thread(target=rank.run, name=f"stagewright rank {rank.context.rank}") for rank in ranks]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        hub.fail("the launcher was interrupted")
        for thread in threads:
            thread.join()
        raise
    errors = [rank.error for rank in ranks if rank.error is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, PeerError)), errors[0])
    return [rank.result for rank in ranks]


class _ThreadRank:
    """One rank as a thread."""

    def __init__(self, function: Callable[..., Any], context: RankContext, args: tuple[Any, ...]) -> None:
        self.context = context
        self.result: Any = None
        self.error: BaseException | None = None
        self._function, self._args = function, args

    def run(self) -> None:
        """Run the function, and tell the others if it fails."""
        try:
            self.result = self._function(self.context, *self._args)
        except BaseException as error:
            self.error = error
            self.context.transport.abort(f"rank {self.context.rank} failed: {type(error).__name__}: {error}")
