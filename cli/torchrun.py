"""What torchrun, or another launcher that sets its variables, has said about this process."""

import os


def torchrun_num_ranks() -> int | None:
    """The number of ranks that were started, if this process is one of them."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def torchrun_rank() -> int | None:
    """This process's rank, if it is one of several."""
    return None if torchrun_num_ranks() is None else int(os.environ["RANK"])


def is_first_rank() -> bool:
    """Whether this process may speak for all: it is rank 0, or no launcher has started it."""
    return torchrun_rank() in (None, 0)
