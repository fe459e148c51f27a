"""Environment: what a launcher has told this process about its place among the ranks, in environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final
from zlib import crc32

from stagewright.engine.launch.launchers import (
    MPICH,
    OPEN_MPI,
    SLURM,
    TORCHRUN,
    Launcher,
    below,
    launcher_of,
    number_of,
)
from stagewright.engine.launch.nodelist import first_node

DEFAULT_PORT: Final = 29500  # torchrun's own
LOOPBACK: Final = "127.0.0.1"
# Ports derived from a job's name: above the system's own, below those that connections get by themselves.
_FIRST_PORT: Final = 15000
_NUM_PORTS: Final = 15000
# Where rank 0 is on the first machine. Ranks of mpirun see the step of what has started them, not all of them the same.
_NODELISTS: Final[Mapping[Launcher, tuple[str, ...]]] = MappingProxyType(
    {
        SLURM: ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        OPEN_MPI: ("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        MPICH: ("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    }
)
_REMEDIES: Final[Mapping[Launcher, str]] = MappingProxyType(
    {
        TORCHRUN: "set MASTER_ADDR to that machine",
        OPEN_MPI: "name that machine, as in mpirun -x MASTER_ADDR=first",
        MPICH: "name that machine, as in mpirun -genv MASTER_ADDR first",
        SLURM: "name that machine, as in MASTER_ADDR=first srun …",
    }
)


@dataclass(frozen=True)
class StartedRank:
    """This process's place, as its launcher says it.

    Args:
        launcher: what has started it.
        rank, num_ranks: which process of how many.
        local_rank, num_local_ranks: which one of how many on its machine; None where that was not said.
    """

    launcher: Launcher
    rank: int
    num_ranks: int
    local_rank: int | None
    num_local_ranks: int | None


def started_rank(environment: Mapping[str, str] = os.environ) -> StartedRank | None:
    """Read which rank this process is; None where no launcher has started it.

    Raises:
        ValueError: the variables are incomplete, or contradict each other.
    """
    launcher = launcher_of(environment)
    if launcher is None:
        return None
    return StartedRank(launcher, *below(environment, launcher.rank, launcher.num_ranks), *_local(environment, launcher))


def meeting_point(started: StartedRank, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Address and port where the ranks find each other: given, or derived from what the launcher says.

    Raises:
        ValueError: nothing says where rank 0 runs.
    """
    return _address(environment, started), _port(environment)


def under_torchrun() -> bool:
    """Whether torchrun has started this process, or something else that sets RANK and WORLD_SIZE."""
    return TORCHRUN.rank in os.environ and TORCHRUN.num_ranks in os.environ


def under_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, mpirun or srun has started this process as a rank, for ``from_environment`` to join the others.

    What srun has started alone, such as an interactive shell, may as well start ranks of its own.

    Raises:
        ValueError: the variables are incomplete, or contradict each other.
    """
    started = started_rank(environment)
    return started is not None and not (started.launcher is SLURM and started.num_ranks == 1)


def _local(environment: Mapping[str, str], launcher: Launcher) -> tuple[int | None, int | None]:
    """Which one of how many ranks on its machine this process is, as far as that is said; LOCAL_RANK comes first."""
    of = TORCHRUN if TORCHRUN.local_rank in environment else launcher
    has_rank, has_count = of.local_rank in environment, of.num_local_ranks in environment
    if has_rank and has_count:
        return below(environment, of.local_rank, of.num_local_ranks)
    return (
        number_of(environment, of.local_rank) if has_rank else None,
        number_of(environment, of.num_local_ranks) if has_count else None,
    )


def _address(environment: Mapping[str, str], started: StartedRank) -> str:
    """Where rank 0 runs."""
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    if started.num_ranks in (1, started.num_local_ranks):
        return LOOPBACK
    for name in _NODELISTS.get(started.launcher, ()):
        if environment.get(name):
            node, is_only = first_node(environment[name])
            return LOOPBACK if is_only else node
    if started.launcher is SLURM and environment.get("SLURM_LAUNCH_NODE_IPADDR"):
        return environment["SLURM_LAUNCH_NODE_IPADDR"]
    raise ValueError(
        f"the ranks meet where rank 0 runs, which {started.launcher.name} has not said: {_REMEDIES[started.launcher]}"
    )


def _port(environment: Mapping[str, str]) -> int:
    """Given, or one that all ranks of a job find alike, and other jobs on the machine hardly."""
    if environment.get("MASTER_PORT"):
        port = number_of(environment, "MASTER_PORT")
        if not 0 < port < 2**16:
            raise ValueError(f"MASTER_PORT is a port, from 1 to 65535: got {port}")
        return port
    jobs = (("SLURM_JOB_ID", "SLURM_STEP_ID"), ("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",))
    for job, *step in jobs:
        if environment.get(job):
            name = ".".join(environment.get(variable, "") for variable in (job, *step))
            return _FIRST_PORT + crc32(name.encode()) % _NUM_PORTS
    return DEFAULT_PORT
