"""Launch: run a function in every rank of a pipeline on this machine."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from stagewright.engine.launch.processes import run_processes
from stagewright.engine.launch.threads import run_threads
from stagewright.engine.transport.hub import Hub
from stagewright.engine.transport.threads import ThreadTransport


def launch_local(
    function: Callable[..., Any],
    num_ranks: int,
    *,
    backend: Literal["gloo", "threads"] = "gloo",
    args: Sequence[Any] = (),
) -> list[Any]:
    """Run ``function(context, *args)`` in every rank and return what each returned, in the order of ranks.

    A rank that returns stays until all have, so that no neighbour loses a message.

    Args:
        function: gets a RankContext. For processes it must be importable, like everything it returns; each gets a
            copy of its own of the arguments.
        num_ranks: ranks to run.
        backend: ``gloo``: a process each, with its share of this machine's cores; ``threads``: all in this process,
            for tests and debugging.
        args: further arguments of the function.

    Raises:
        Exception: what the first failing rank raised, with that rank's traceback behind the launcher's, or, where an
            error has causes of its own, all of that as its cause; by then no rank runs any more.
        RankError: a rank has died, or raised what cannot be brought here.
        TypeError: the function or its arguments cannot be brought to other processes.
    """
    if num_ranks < 1:
        raise ValueError(f"a pipeline has at least one rank: got num_ranks={num_ranks}")
    match backend:
        case "gloo":
            return run_processes(function, num_ranks, tuple(args))
        case "threads":
            hub = Hub(num_ranks)
            transports = [ThreadTransport(hub, rank) for rank in range(num_ranks)]
            return run_threads(function, hub, transports, tuple(args))
        case _:
            raise ValueError(f"a backend is gloo or threads: got {backend!r}")
