"""Rank process: the life of one rank as a process of its own, from its start to its report."""

import gc
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from tblib import Traceback
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from stagewright.engine.errors import PeerError, RankError, described
from stagewright.engine.launch.context import context_of, num_cores, tell_end
from stagewright.engine.launch.meeting import use_loopback
from stagewright.engine.transport.gloo import GlooTransport

# In what text gloo's own errors are told from others: they begin with a place in its source.
_GLOO_SOURCE: Final = "/gloo/"
# And what it says of an operation that was broken off because a rank has failed.
_BROKEN_OFF: Final = "Application timeout caused pair closure"


@dataclass(frozen=True, slots=True)
class Task:
    """What a rank's process is started with.

    Args:
        rank, num_ranks: which one of how many.
        port: of the launcher's store, where the ranks find each other.
        work: (function, arguments), pickled.
    """

    rank: int
    num_ranks: int
    port: int
    work: bytes


@dataclass(frozen=True, slots=True)
class Success:
    """A rank's result, pickled."""

    result: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank raised, in a form that can always be brought to the launcher.

    Args:
        summary: type and message.
        notes: that were added to the error.
        text: the whole traceback, with those of its causes; empty where there is none.
        frames: of the traceback, as plain data, where the error has no causes.
        error: the error itself, pickled; None where that cannot be done.
        is_consequence: whether it is only what a rank sees when another one has failed.
        moment: when it was, by a clock that all processes share.
    """

    summary: str
    notes: tuple[str, ...] = ()
    text: str = ""
    frames: Mapping[str, Any] | None = None
    error: bytes | None = None
    is_consequence: bool = False
    moment: float = field(default_factory=monotonic)


Report: TypeAlias = Success | Failure


def rank_main(task: Task, pipe: Connection) -> None:
    """Run a task, report, and stay until the launcher has heard from all ranks, so that no one loses a message."""
    # Ctrl-C reaches all processes of a terminal: the launcher alone decides. It started this one with SIGINT blocked.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_follow_launcher, daemon=True).start()
    report = _run(task)
    sys.stdout.flush()  # the launcher may end this process before it gets to that by itself
    sys.stderr.flush()
    try:
        pipe.send(report)
        pipe.recv()
    except (EOFError, OSError):
        os._exit(1)  # the launcher has gone
    if dist.is_initialized():
        dist.destroy_process_group()


def _run(task: Task) -> Report:
    try:
        function, args = _load(task)
        torch.set_num_threads(max(1, num_cores() // task.num_ranks))
        _connect(task)
        transport = GlooTransport()
    except BaseException as error:
        return failure_of(error)
    gc.freeze()  # what was imported lives as long as the process: no collection amid a step need look at it again
    try:
        result = _dump(function(context_of(transport), *args), task.rank)
        transport.leave()  # whoever waits for this rank, now or later, is told
        return Success(result)
    except BaseException as error:
        tell_end(transport, error)
        return failure_of(error)


def _load(task: Task) -> tuple[Any, tuple[Any, ...]]:
    try:
        function, args = pickle.loads(task.work)
    except Exception as error:
        raise RankError(
            f"rank {task.rank} cannot load the function or an argument of launch_local ({error}): processes find "
            "what stands at the top of a file that can be imported, but nothing from an interactive session or "
            "`python -c`; write it to a file, or use backend='threads'"
        ) from error
    return function, args


def _connect(task: Task) -> None:
    """Join the default process group; all ranks are on this machine, so whatever its name resolves to is not asked."""
    use_loopback()
    store = TCPStore("127.0.0.1", task.port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=task.rank, world_size=task.num_ranks, timeout=timedelta(minutes=30)
    )


def _dump(result: Any, rank: int) -> bytes:
    # Plainly pickled: through a multiprocessing connection, tensors would travel as one open file each.
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"rank {rank} returned a {type(result).__name__} that cannot be brought to the launcher ({error}): "
            "return tensors, numbers, containers of those, or what else can be pickled"
        ) from error


def failure_of(error: BaseException) -> Failure:
    """An error as a report."""
    return Failure(
        summary=described(error),
        notes=tuple(str(note) for note in getattr(error, "__notes__", ())),
        text="".join(traceback.format_exception(error)),
        frames=_frames_of(error),
        error=_pickled(error),
        is_consequence=is_consequence(error),
    )


def _frames_of(error: BaseException) -> Mapping[str, Any] | None:
    has_causes = error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__)
    return None if has_causes else Traceback(error.__traceback__).as_dict()


def is_consequence(error: BaseException) -> bool:
    """Whether an error is what a rank sees when another one has gone; in user code that talks to others too."""
    if isinstance(error, PeerError | dist.DistError):
        return True
    said = str(error) if isinstance(error, RuntimeError) and not isinstance(error, RankError) else ""
    return _GLOO_SOURCE in said or said == _BROKEN_OFF


def _pickled(error: BaseException) -> bytes | None:
    """The error itself, where it survives the way; what would end the launcher does not go there as it is."""
    if not isinstance(error, Exception):
        return None
    with suppress(Exception):
        data = pickle.dumps(error)
        copy = pickle.loads(data)
        if type(copy) is type(error) and str(copy) == str(error):
            return data
    return None


def _follow_launcher() -> None:
    """End this process when the launcher has gone, however it went."""
    launcher = mp.parent_process()
    assert launcher is not None, "a rank is started by a launcher"
    while launcher.is_alive() and os.getppid() == launcher.pid:
        launcher.join(1.0)  # it can seem alive for longer, as long as other processes of its own hold its pipes
    os._exit(1)
