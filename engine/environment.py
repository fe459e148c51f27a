"""Environment: what a launcher has told this process about its place among the ranks, in environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final
from zlib import crc32

from stagewright.engine.nodelist import expand_nodelist

DEFAULT_PORT: Final = 29500  # torchrun's own
LOOPBACK: Final = "127.0.0.1"
# Ports derived from a job's name: above the system's own, below those that connections get by themselves.
_FIRST_PORT: Final = 15000
_NUM_PORTS: Final = 15000


@dataclass(frozen=True)
class Launcher:
    """The variables in which a launcher numbers the processes that it starts.

    Args:
        name: of the command.
        rank, num_ranks: which process of how many.
        local_rank, num_local_ranks: which one of how many on its machine.
    """

    name: str
    rank: str
    num_ranks: str
    local_rank: str
    num_local_ranks: str


TORCHRUN: Final = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI: Final = Launcher(
    "mpirun",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
MPICH: Final = Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# srun says how many run on every machine, in a list of which nothing else is wanted: the ranks tell each other.
SLURM: Final = Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "")
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
# The first one whose variables are set counts: what runs inside a job of another launcher was started later.
LAUNCHERS: Final = (TORCHRUN, OPEN_MPI, MPICH, SLURM)


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
    launcher = _launcher(environment)
    if launcher is None:
        return None
    return StartedRank(
        launcher, *_below(environment, launcher.rank, launcher.num_ranks), *_local(environment, launcher)
    )


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


def _launcher(environment: Mapping[str, str]) -> Launcher | None:
    """Whose variables count."""
    complete = [launcher for launcher in LAUNCHERS if {launcher.rank, launcher.num_ranks} <= environment.keys()]
    # The script of a batch job is told that it is process 0 of all, but only srun starts them.
    if SLURM in complete and environment.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environment:
        complete.remove(SLURM)
    if not complete:
        _refuse_half(environment)
        return None
    launcher = complete[0]
    # srun speaks the protocol of MPICH too; where mpirun has started daemons with srun, the two count differently.
    if launcher is MPICH and SLURM in complete and _agree(environment, MPICH, SLURM):
        launcher = SLURM
    _refuse_contradiction(environment, launcher, complete)
    return launcher


def _refuse_half(environment: Mapping[str, str]) -> None:
    """Every launcher sets a rank's number and how many there are."""
    for launcher in LAUNCHERS:
        pair = (launcher.rank, launcher.num_ranks)
        given = [name for name in pair if name in environment]
        if launcher is SLURM and (given == [SLURM.num_ranks] or environment.get("ENVIRONMENT") == "BATCH"):
            continue  # the shell that srun is called from knows the number of tasks too
        if len(given) == 1:
            (missing,) = set(pair) - set(given)
            raise ValueError(
                f"{launcher.name} sets {launcher.rank} and {launcher.num_ranks}: {given[0]}={environment[given[0]]} is "
                f"set, but {missing} is not; set both, or neither to start without {launcher.name}"
            )


def _refuse_contradiction(environment: Mapping[str, str], launcher: Launcher, complete: list[Launcher]) -> None:
    """RANK and WORLD_SIZE that were set by hand are those of the launcher below; torchrun counts by itself."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return
    other = launcher
    if launcher is TORCHRUN:
        # A task that starts several ranks counts more than there are tasks.
        same_size = [one for one in complete[1:] if environment[one.num_ranks] == environment[TORCHRUN.num_ranks]]
        if not same_size:
            return
        other = same_size[0]
    for name, its_name in ((TORCHRUN.rank, other.rank), (TORCHRUN.num_ranks, other.num_ranks)):
        if name in environment and environment[name] != environment[its_name]:
            raise ValueError(
                f"{name}={environment[name]} contradicts {its_name}={environment[its_name]}, which {other.name} has "
                f"set: unset {name}"
            )


def _agree(environment: Mapping[str, str], one: Launcher, other: Launcher) -> bool:
    pairs = ((one.rank, other.rank), (one.num_ranks, other.num_ranks))
    return all(environment[name] == environment[its_name] for name, its_name in pairs)


def _local(environment: Mapping[str, str], launcher: Launcher) -> tuple[int | None, int | None]:
    """Which one of how many ranks on its machine this process is, as far as that is said; LOCAL_RANK comes first."""
    of = TORCHRUN if TORCHRUN.local_rank in environment else launcher
    has_rank, has_count = of.local_rank in environment, of.num_local_ranks in environment
    if has_rank and has_count:
        return _below(environment, of.local_rank, of.num_local_ranks)
    return (
        _number(environment, of.local_rank) if has_rank else None,
        _number(environment, of.num_local_ranks) if has_count else None,
    )


def _below(environment: Mapping[str, str], index: str, count: str) -> tuple[int, int]:
    """An index and of how many."""
    value, limit = _number(environment, index), _number(environment, count)
    if value >= limit:
        raise ValueError(f"ranks are counted from 0, so {index} is below {count}: got {index}={value}, {count}={limit}")
    return value, limit


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} is a whole number from 0 up: got {name}={text!r}")
    return int(text)


def _address(environment: Mapping[str, str], started: StartedRank) -> str:
    """Where rank 0 runs."""
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    if started.num_ranks in (1, started.num_local_ranks):
        return LOOPBACK
    for name in _NODELISTS.get(started.launcher, ()):
        if environment.get(name):
            nodes = expand_nodelist(environment[name])
            return LOOPBACK if len(nodes) == 1 else nodes[0]
    if started.launcher is SLURM and environment.get("SLURM_LAUNCH_NODE_IPADDR"):
        return environment["SLURM_LAUNCH_NODE_IPADDR"]
    raise ValueError(
        f"the ranks meet where rank 0 runs, which {started.launcher.name} has not said: {_REMEDIES[started.launcher]}"
    )


def _port(environment: Mapping[str, str]) -> int:
    """Given, or one that all ranks of a job find alike, and other jobs on the machine hardly."""
    if environment.get("MASTER_PORT"):
        port = _number(environment, "MASTER_PORT")
        if not 0 < port < 2**16:
            raise ValueError(f"MASTER_PORT is a port, from 1 to 65535: got {port}")
        return port
    jobs = (("SLURM_JOB_ID", "SLURM_STEP_ID"), ("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",))
    for job, *step in jobs:
        if environment.get(job):
            name = ".".join(environment.get(variable, "") for variable in (job, *step))
            return _FIRST_PORT + crc32(name.encode()) % _NUM_PORTS
    return DEFAULT_PORT
