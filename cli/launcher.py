"""What torchrun, mpirun or srun has said about this process."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagewright.engine.launch.environment import StartedRank

# How the variables end in which a launcher numbers what it starts.
_SIGNS = ("RANK", "WORLD_SIZE", "PMI_SIZE", "SLURM_PROCID")


def num_started_ranks() -> int | None:
    """The number of ranks that a launcher has started, if this process is one of them.

    Raises ValueError where the launcher's variables contradict each other.
    """
    started = _started()
    return None if started is None else started.num_ranks


def own_rank() -> int | None:
    """This process's rank, if a launcher has started it. Raises ValueError as above."""
    started = _started()
    return None if started is None else started.rank


def launcher_name() -> str:
    """What has started this process. Raises ValueError as above."""
    started = _started()
    return "nothing" if started is None else started.launcher.name


def is_launched() -> bool:
    """Whether a launcher is known to have started this process as a rank."""
    try:
        return own_rank() is not None
    except ValueError:
        return False


def is_first_rank() -> bool:
    """Whether this process may speak for all: it is rank 0, or none that a launcher is known to have started."""
    return not is_launched() or own_rank() == 0


def _started() -> "StartedRank | None":
    if not any(name.endswith(_SIGNS) for name in os.environ):
        return None
    from stagewright.engine.launch.environment import (  # late: torch takes seconds to import
        started_rank,
        under_launcher,
    )

    return started_rank() if under_launcher() else None
