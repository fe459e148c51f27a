"""Launchers: which one has started this process, by the variables in which they number the ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# The step in which salloc opens a shell on a node (SLURM_INTERACTIVE_STEP of slurm.h).
_INTERACTIVE_STEP: Final = str(0xFFFFFFFA)
_MAX_DIGITS: Final = 18


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
# The first one whose variables are set counts: what runs inside a job of another launcher was started later.
LAUNCHERS: Final = (TORCHRUN, OPEN_MPI, MPICH, SLURM)


def launcher_of(environment: Mapping[str, str]) -> Launcher | None:
    """Whose variables count; None where no launcher has started this process.

    Raises:
        ValueError: the variables are incomplete, or contradict each other.
    """
    complete = [launcher for launcher in LAUNCHERS if {launcher.rank, launcher.num_ranks} <= environment.keys()]
    # A batch script, or a shell that salloc has opened, is told that it is process 0 of all, but only srun starts them.
    in_script = environment.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environment
    if in_script or environment.get("SLURM_STEP_ID") == _INTERACTIVE_STEP:
        complete = [one for one in complete if one is not SLURM and not _is_of_srun(environment, one)]
    if not complete:
        _refuse_half(environment)
        return None
    launcher = complete[0]
    # srun speaks the protocol of MPICH too; where mpirun has started daemons with srun, the two count differently.
    if _is_of_srun(environment, launcher):
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
    """What was set by hand, or left behind by an earlier launch, fits what has started this process.

    Open MPI's daemons may be fewer or more than its ranks, so of srun's numbers below mpirun's nothing follows.
    """
    if launcher is OPEN_MPI and MPICH in complete and not _is_of_srun(environment, MPICH):
        _refuse_others(environment, OPEN_MPI, MPICH)
    if "TORCHELASTIC_RUN_ID" in environment:
        return  # torchrun counts by itself
    if launcher is TORCHRUN:
        for other in complete[1:2]:
            _refuse_by_hand(environment, SLURM if _is_of_srun(environment, other) else other)
        return
    for name, its_name in ((TORCHRUN.rank, launcher.rank), (TORCHRUN.num_ranks, launcher.num_ranks)):
        if name in environment and environment[name] != environment[its_name]:
            raise _contradiction(environment, name, its_name, launcher, f"unset {name}")


def _refuse_by_hand(environment: Mapping[str, str], other: Launcher) -> None:
    """RANK and WORLD_SIZE count the tasks of the launcher below, or, where each of them starts several, more ranks.

    Of k ranks a task, those of task i are usually the k from i * k on; or they are dealt out to the tasks in turn.
    """
    rank, num_ranks = below(environment, TORCHRUN.rank, TORCHRUN.num_ranks)
    task, num_tasks = below(environment, other.rank, other.num_ranks)
    remedy = (
        f"unset {TORCHRUN.rank} and {TORCHRUN.num_ranks}, which may be left from another launch, or {other.rank} and "
        f"{other.num_ranks} where {other.name} has not started this rank"
    )
    if num_ranks < num_tasks:
        raise _contradiction(environment, TORCHRUN.num_ranks, other.num_ranks, other, remedy)
    per_task, rest = divmod(num_ranks, num_tasks)
    if not rest and task not in (rank // per_task, rank % num_tasks):
        raise _contradiction(environment, TORCHRUN.rank, other.rank, other, remedy)


def _refuse_others(environment: Mapping[str, str], one: Launcher, other: Launcher) -> None:
    """Two launchers that both count ranks count the same."""
    for name, its_name in ((one.num_ranks, other.num_ranks), (one.rank, other.rank)):
        if environment[name] != environment[its_name]:
            remedy = f"unset {one.rank} and {one.num_ranks}, or {other.rank} and {other.num_ranks}, whichever are old"
            raise _contradiction(environment, name, its_name, other, remedy)


def _contradiction(
    environment: Mapping[str, str], name: str, its_name: str, launcher: Launcher, remedy: str
) -> ValueError:
    return ValueError(
        f"{name}={environment[name]} contradicts {its_name}={environment[its_name]}, which {launcher.name} has set: "
        f"{remedy}"
    )


def _is_of_srun(environment: Mapping[str, str], launcher: Launcher) -> bool:
    """Whether variables of MPICH are those that srun sets, which speaks its protocol too."""
    return (
        launcher is MPICH and {SLURM.rank, SLURM.num_ranks} <= environment.keys() and _agree(environment, MPICH, SLURM)
    )


def _agree(environment: Mapping[str, str], one: Launcher, other: Launcher) -> bool:
    pairs = ((one.rank, other.rank), (one.num_ranks, other.num_ranks))
    return all(environment[name] == environment[its_name] for name, its_name in pairs)


def below(environment: Mapping[str, str], index: str, count: str) -> tuple[int, int]:
    """An index and of how many.

    Raises:
        ValueError: they are no such numbers.
    """
    value, limit = number_of(environment, index), number_of(environment, count)
    if value >= limit:
        raise ValueError(f"ranks are counted from 0, so {index} is below {count}: got {index}={value}, {count}={limit}")
    return value, limit


def number_of(environment: Mapping[str, str], name: str) -> int:
    """A variable as a number.

    Raises:
        ValueError: it is none from 0 up.
    """
    text = environment[name]
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise ValueError(f"{name} is a whole number from 0 up: got {name}={text[:80]!r}")
    return int(text)
