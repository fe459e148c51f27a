"""Launch, processes: the ranks of a pipeline as processes of this machine, from their start to the last one's end."""

import multiprocessing as mp
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, Final

from tblib import Traceback
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from stagewright.engine.errors import RankError
from stagewright.engine.launch.rank_process import Failure, Report, Success, Task, rank_main

# How long a rank may take to say what went wrong after another has died, and to end once all are done or one failed.
_GRACE_SECONDS: Final = 3.0
# And how long, to end by itself, once it has been told which other one has failed.
_LAST_WORDS_SECONDS: Final = 1.0
# A rank that was killed can leave processes that hold its pipe open: so it is also looked at this often.
_POLL_SECONDS: Final = 0.5
# How often a thread of GNU's OpenMP looks for work before it sleeps: as where it sees more threads than cores. 300,000,
# as it is otherwise, keeps the cores from all others: with five busy processes beside it on two cores, a rank of two
# threads made less than 6 steps of the demo in 40 s, now 3300 tokens/s. On a quiet machine both are as fast (22,000
# tokens/s), while OMP_WAIT_POLICY=PASSIVE, never to look, costs a third there.
_SPINS: Final = ("GOMP_SPINCOUNT", "1000")
# With this a process ends that was started for a rank, but found its script starting ranks on import.
_NO_MAIN_GUARD: Final = 87


def run_processes(function: Callable[..., Any], num_ranks: int, args: tuple[Any, ...]) -> list[Any]:
    """Run ``function(context, *args)`` in a process a rank and return what each returned, in the order of ranks.

    Raises:
        Exception: what the first failing rank raised, with that rank's traceback.
        RankError: a rank has died, or raised what cannot be brought here.
        TypeError: the function or its arguments cannot be brought to other processes.
    """
    if getattr(mp.current_process(), "_inheriting", False):  # a rank imports the script that launches it
        raise SystemExit(_NO_MAIN_GUARD)
    work = _packed(function, args)
    # The store lives here and not in a rank, so that no dying rank takes it along.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    processes = _Processes()
    try:
        processes.start([Task(rank, num_ranks, port, work) for rank in range(num_ranks)])
        return processes.results()
    finally:
        processes.end()
        del store


class _Processes:
    """The processes of all ranks, and a pipe to each."""

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def start(self, tasks: list[Task]) -> None:
        """Start a process a task."""
        context = mp.get_context("spawn")
        resource_tracker.ensure_running()  # which ends with SIGINT let in, so before it is shut out
        with _interrupts_later(), _short_spins():
            for task in tasks:
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                # No daemon: a rank may have processes of its own, such as the workers of a DataLoader.
                process = context.Process(
                    target=rank_main, args=(task, theirs), name=f"stagewright rank {task.rank}", daemon=False
                )
                try:
                    process.start()
                finally:
                    theirs.close()
                self._processes.append(process)

    def results(self) -> list[Any]:
        """Wait for all ranks to return.

        Raises:
            Exception: what the first failing rank raised.
        """
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        deadline = None
        while len(results) + len(failures) < len(self._pipes):
            pending = [rank for rank in range(len(self._pipes)) if rank not in results and rank not in failures]
            for rank, report in self._reports(pending).items():
                if isinstance(report, Success):
                    results[rank] = _unpacked(report.result, rank)
                else:
                    failures[rank] = report
            if failures and deadline is None:
                deadline = monotonic() + _GRACE_SECONDS
            # Who only suffers from another's failure may be the first to report: that other one has some time, then.
            if deadline is not None and not all(failure.is_consequence for failure in failures.values()):
                deadline = min(deadline, monotonic() + _LAST_WORDS_SECONDS)
            if deadline is not None and monotonic() > deadline:
                break
        if failures:
            raise _error_of(failures)
        self._dismiss()
        return [results[rank] for rank in range(len(self._pipes))]

    def end(self) -> None:
        """Leave no process behind."""
        with _interrupts_later():
            for process in self._processes:
                process.terminate()
                _wake(process)
            _join(self._processes)
            for process in self._processes:
                process.kill()
                process.join()
                process.close()
            for pipe in self._pipes:
                pipe.close()

    def _dismiss(self) -> None:
        """Let the ranks end by themselves."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send("done")
        _join(self._processes)

    def _reports(self, pending: list[int]) -> Mapping[int, Report]:
        """What ranks have reported, or how they died, in the order of ranks; nothing after a while."""
        of_pipes = {self._pipes[rank]: rank for rank in pending}
        reports = {}
        dead = [rank for rank in pending if self._processes[rank].exitcode is not None]
        for pipe in wait(list(of_pipes), 0 if dead else _POLL_SECONDS):
            rank = of_pipes[pipe]  # type: ignore[index]
            try:
                reports[rank] = self._pipes[rank].recv()
            except (EOFError, OSError):
                reports[rank] = self._death(rank)
        reports |= {rank: self._death(rank) for rank in dead if rank not in reports}
        return dict(sorted(reports.items()))

    def _death(self, rank: int) -> Failure:
        process = self._processes[rank]
        process.join(_GRACE_SECONDS)
        code = process.exitcode
        if code == _NO_MAIN_GUARD:
            return Failure(
                "every rank imports this script, which would then start ranks again: put the call of launch_local "
                'under\n\n    if __name__ == "__main__":\n'
            )
        if code is None:
            return Failure(f"rank {rank} has closed its connection to the launcher")
        if code < 0:
            return Failure(f"rank {rank} was ended by signal {-code} ({signal.strsignal(-code)}) before it returned")
        return Failure(f"rank {rank} exited with code {code} before it returned")


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Put off Ctrl-C to the end of the block; processes that start in it are born deaf to it."""
    caught: list[Any] = []
    is_main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGINT, lambda *details: caught.append(details)) if is_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_main:
            signal.signal(signal.SIGINT, previous)
        if caught and callable(previous):
            previous(*caught[-1])


@contextmanager
def _short_spins() -> Iterator[None]:
    """Let processes that start in the block have threads that soon sleep, unless the user has said how they wait."""
    name, value = _SPINS
    is_ours = not {name, "OMP_WAIT_POLICY"} & os.environ.keys()
    if is_ours:
        os.environ[name] = value  # read when torch is imported, which in a rank comes before any code of ours
    try:
        yield
    finally:
        if is_ours:
            os.environ.pop(name, None)


def _wake(process: BaseProcess) -> None:
    """A process that is stopped hears of no signal but this one."""
    if process.pid is not None and process.exitcode is None and hasattr(signal, "SIGCONT"):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)


def _join(processes: list[BaseProcess]) -> None:
    """Wait for all processes, not for long."""
    deadline = monotonic() + _GRACE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - monotonic()))


def _packed(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    # Plainly pickled: multiprocessing would move tensors to memory that all ranks and this process share.
    try:
        return pickle.dumps((function, args))
    except Exception as error:
        raise TypeError(
            f"the function and the arguments of launch_local go to other processes, but {error}: define the function "
            "at the top of a file and pass it what can be pickled, or use backend='threads'"
        ) from error


def _unpacked(data: bytes, rank: int) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise RankError(f"what rank {rank} returned cannot be read by the launcher: {error}") from error


def _error_of(failures: Mapping[int, Failure]) -> BaseException:
    """The first error that is no consequence of another rank's; of a rank that has died also what the others saw."""
    in_order = sorted(failures, key=lambda rank: (failures[rank].is_consequence, failures[rank].moment))
    first = in_order[0]
    error = _as_error(first, failures[first])
    seen = [failures[rank].summary for rank in in_order if failures[rank].is_consequence]
    if seen and not failures[first].text:
        error.add_note(seen[0].partition(": ")[2])
    return error


def _as_error(rank: int, failure: Failure) -> BaseException:
    """The error of a rank, with its traceback behind the launcher's; as its cause where there are several."""
    error = _original(failure.error)
    if error is None:
        error = RankError(failure.summary)
        for note in failure.notes:
            error.add_note(note)
    if failure.frames is not None:
        if not any(f"rank {rank} " in note for note in failure.notes):
            error.add_note(f"in rank {rank}")
        return error.with_traceback(Traceback.from_dict(failure.frames).as_traceback())
    if failure.text:
        error.__cause__ = RankError(f"in rank {rank}:\n\n{failure.text}")
    return error


def _original(data: bytes | None) -> BaseException | None:
    """The very error that a rank raised, where it can be made again here."""
    try:
        return None if data is None else pickle.loads(data)
    except Exception:
        return None
