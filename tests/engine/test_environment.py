"""What launchers say about a process: who it is, where the ranks meet, and what is refused."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from launched import Environment, free_port, mpich, open_mpi, srun, torchrun
from test_context import environment

from stagewright.engine.launch.environment import meeting_point, started_rank, under_launcher
from stagewright.engine.launch.launchers import MPICH, OPEN_MPI, SLURM, TORCHRUN
from stagewright.engine.launch.meeting import backend_for, device_of


def without(variables: Environment, *names: str) -> Environment:
    return {name: value for name, value in variables.items() if name not in names}


def place(variables: Environment) -> tuple[str, int, int, int | None, int | None]:
    """Which launcher, and the four numbers it gives."""
    started = started_rank(variables)
    assert started is not None
    return started.launcher.name, started.rank, started.num_ranks, started.local_rank, started.num_local_ranks


def where(variables: Environment) -> tuple[str, int]:
    started = started_rank(variables)
    assert started is not None
    return meeting_point(started, variables)


# Who a process is


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (torchrun(3, 4, 2), ("torchrun", 3, 4, 1, 2)),
        (srun(3, 4), ("srun", 3, 4, 3, None)),
        (open_mpi(3, 4, 2), ("mpirun", 3, 4, 1, 2)),
        (mpich(3, 4, 2), ("mpirun", 3, 4, 1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("torchrun", 1, 2, None, None)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ("mpirun", 1, 2, None, None)),
    ],
)
def test_every_launcher_is_understood(variables: Environment, expected: tuple[object, ...]) -> None:
    assert place(variables) == expected
    assert under_launcher(variables)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        # one task a machine, which starts torchrun there
        (srun(1, 2, "a,b") | torchrun(5, 8, 4), TORCHRUN),
        (open_mpi(1, 2, 1) | torchrun(5, 8, 4), TORCHRUN),
        # mpirun starts a daemon a machine with srun
        (srun(0, 2, "a,b") | open_mpi(3, 4, 2), OPEN_MPI),
        (srun(0, 2, "a,b") | mpich(3, 4, 2), MPICH),
        # srun --mpi=pmi2 speaks MPICH's protocol
        (srun(1, 2, "a,b") | {"PMI_RANK": "1", "PMI_SIZE": "2"}, SLURM),
        # variables made by hand from those of the launcher
        (srun(1, 2, "a,b") | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, TORCHRUN),
        (srun(1, 2, "a,b") | {"WORLD_SIZE": "2"}, SLURM),
        # each task starts several ranks by itself, and numbers them one way or the other, or has another number of them
        (srun(1, 2, "a,b") | {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}, TORCHRUN),
        (srun(1, 2, "a,b") | {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, TORCHRUN),
        (open_mpi(1, 2, 1) | {"RANK": "1", "WORLD_SIZE": "5"}, TORCHRUN),
        (open_mpi(0, 1) | {"RANK": "1", "WORLD_SIZE": "2"}, TORCHRUN),
        # mpirun of Open MPI in a task of srun --mpi=pmi2
        (srun(0, 2, "a,b") | {"PMI_RANK": "0", "PMI_SIZE": "2"} | open_mpi(3, 4, 2), OPEN_MPI),
        (open_mpi(1, 2) | {"PMI_RANK": "1", "PMI_SIZE": "2"}, OPEN_MPI),
    ],
)
def test_what_was_started_last_counts(variables: Environment, expected: object) -> None:
    started = started_rank(variables)
    assert started is not None
    assert started.launcher is expected


def test_a_local_rank_given_by_hand_comes_first() -> None:
    assert place(srun(3, 4) | {"LOCAL_RANK": "0"}) == ("srun", 3, 4, 0, None)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"MASTER_ADDR": "first", "LOCAL_RANK": "0"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"},  # the shell of salloc
        without(srun(0, 4), "SLURM_STEP_ID") | {"ENVIRONMENT": "BATCH"},  # the script of sbatch
        without(srun(0, 4), "SLURM_STEP_ID", "SLURM_NTASKS") | {"ENVIRONMENT": "BATCH"},
        srun(0, 4) | {"SLURM_STEP_ID": "4294967290"},  # a shell that salloc has opened on a node
        srun(0, 4) | {"SLURM_STEP_ID": "4294967290", "PMI_RANK": "0", "PMI_SIZE": "4"},
    ],
)
def test_what_no_launcher_has_started_is_no_rank(variables: Environment) -> None:
    assert started_rank(variables) is None
    assert not under_launcher(variables)


def test_what_srun_has_started_alone_may_start_ranks_of_its_own_or_be_a_rank() -> None:
    assert not under_launcher(srun(0, 1))
    assert place(srun(0, 1)) == ("srun", 0, 1, 0, None)
    assert under_launcher(srun(0, 4) | {"ENVIRONMENT": "BATCH"})  # a step that a batch script starts


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"RANK": "1"},
            "torchrun sets RANK and WORLD_SIZE: RANK=1 is set, but WORLD_SIZE is not; set both",
        ),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, but RANK is not"),
        (without(open_mpi(0, 2), "OMPI_COMM_WORLD_SIZE"), "mpirun sets OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE"),
        (without(mpich(0, 2), "PMI_RANK"), "PMI_SIZE=2 is set, but PMI_RANK is not"),
        (without(srun(0, 2), "SLURM_NTASKS"), "SLURM_PROCID=0 is set, but SLURM_NTASKS is not"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is a whole number from 0 up: got RANK='x'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is a whole number from 0 up: got RANK='-1'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "so RANK is below WORLD_SIZE: got RANK=2, WORLD_SIZE=2"),
        (srun(4, 4), "SLURM_PROCID is below SLURM_NTASKS: got SLURM_PROCID=4, SLURM_NTASKS=4"),
        (torchrun(1, 4, 2) | {"LOCAL_RANK": "2"}, "LOCAL_RANK is below LOCAL_WORLD_SIZE"),
        (
            srun(1, 2) | {"WORLD_SIZE": "4"},
            "WORLD_SIZE=4 contradicts SLURM_NTASKS=2, which srun has set: unset",
        ),
        (open_mpi(1, 2) | {"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 contradicts OMPI_COMM_WORLD_RANK=1"),
        ({"RANK": "1" * 5000, "WORLD_SIZE": "2"}, "RANK is a whole number from 0 up: got RANK='1{80}'$"),
        (
            open_mpi(1, 2) | {"PMI_RANK": "0", "PMI_SIZE": "1"},
            "OMPI_COMM_WORLD_SIZE=2 contradicts PMI_SIZE=1, which mpirun has set: unset OMPI_COMM_WORLD_RANK and "
            "OMPI_COMM_WORLD_SIZE, or PMI_RANK and PMI_SIZE, whichever are old",
        ),
    ],
)
def test_what_is_incomplete_or_contradicts_itself_is_refused(variables: Environment, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        started_rank(variables)


@pytest.mark.parametrize(
    ("launched", "names"),
    [
        (open_mpi, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpirun")),
        (mpich, ("PMI_RANK", "PMI_SIZE", "mpirun")),
        (srun, ("SLURM_PROCID", "SLURM_NTASKS", "srun")),
    ],
)
@pytest.mark.parametrize("old", [(0, 1), (1, 2), (0, 2)])
def test_ranks_left_from_another_launch_are_refused_with_what_to_unset(
    launched: Callable[[int, int], Environment], names: tuple[str, str, str], old: tuple[int, int]
) -> None:
    """Each of them would train alone, or two would be the same rank."""
    rank, size, name = names
    rank_before, size_before = old
    message = (
        f"WORLD_SIZE={size_before} contradicts {size}=3, which {name} has set: unset RANK and WORLD_SIZE, which may be "
        f"left from another launch, or {rank} and {size} where {name} has not started this rank"
    )
    for task in range(3):
        variables = launched(task, 3) | {"RANK": str(rank_before), "WORLD_SIZE": str(size_before)}
        for ask in (started_rank, under_launcher):
            with pytest.raises(ValueError, match=re.escape(message)):
                ask(variables)


def test_of_several_ranks_a_task_those_of_another_task_are_refused() -> None:
    left = {"RANK": "0", "WORLD_SIZE": "4"}
    assert place(open_mpi(0, 2) | left)[:3] == ("torchrun", 0, 4)
    with pytest.raises(ValueError, match="RANK=0 contradicts OMPI_COMM_WORLD_RANK=1, which mpirun has set: unset RANK"):
        started_rank(open_mpi(1, 2) | left)


# Where ranks meet


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        (torchrun(0, 2), "first"),
        (srun(0, 2), "127.0.0.1"),  # a single machine
        (srun(0, 2, "node[07,03]"), "node07"),
        (srun(0, 2, "node[07,03]") | {"MASTER_ADDR": "node03"}, "node03"),
        (without(srun(0, 2, "a,b"), "SLURM_STEP_NODELIST"), "a"),
        (without(srun(0, 2, "a,b"), "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "10.0.0.1"),
        (open_mpi(0, 2), "127.0.0.1"),
        (mpich(0, 2), "127.0.0.1"),
        (open_mpi(0, 4, 2) | {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_STEP_NODELIST": "n2"}, "n1"),
    ],
)
def test_ranks_meet_where_the_first_one_runs(variables: Environment, address: str) -> None:
    assert where(variables)[0] == address


@pytest.mark.parametrize(
    ("variables", "remedy"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "which torchrun has not said: set MASTER_ADDR to that machine"),
        (open_mpi(0, 4, 2), "which mpirun has not said: name that machine, as in mpirun -x MASTER_ADDR=first"),
        (mpich(0, 4, 2), "mpirun -genv MASTER_ADDR first"),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
            "which srun has not said: name that machine, as in MASTER_ADDR",
        ),
    ],
)
def test_an_unknown_place_is_refused_with_the_remedy(variables: Environment, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        where(variables)


def test_the_port_is_given_or_that_of_the_job() -> None:
    assert where(torchrun(0, 2))[1] == 29501
    assert where(mpich(0, 2))[1] == 29500  # torchrun's own, where there is no job
    ports = {where(srun(rank, 2, job=job))[1] for job in range(100) for rank in range(2)}
    assert 90 < len(ports) <= 100, "ranks of a job have the same one, jobs hardly ever"
    assert all(15000 <= port < 30000 for port in ports)
    assert where(srun(0, 2))[1] != where(srun(0, 2) | {"SLURM_STEP_ID": "1"})[1]
    with pytest.raises(ValueError, match="MASTER_PORT is a port, from 1 to 65535: got 70000"):
        where(srun(0, 2) | {"MASTER_PORT": "70000"})


# Where they compute


@pytest.mark.parametrize(
    ("num_gpus", "devices"), [(0, ["cpu"] * 3), (1, ["cuda:0"] * 3), (4, ["cuda:0", "cuda:1", "cuda:2"])]
)
def test_the_local_rank_chooses_the_gpu(num_gpus: int, devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    assert [str(device_of(local_rank)) for local_rank in range(3)] == devices
    assert chosen == [device for device in devices if device != "cpu"], "it is the current one from then on"


def test_nccl_connects_ranks_that_have_a_gpu_each_and_gloo_all_others() -> None:
    assert backend_for(["GPU-a", "GPU-b", "GPU-c"]) == "nccl"
    assert backend_for(["GPU-a", "GPU-b", "GPU-a"]) == "gloo"
    assert backend_for(["GPU-a", "cpu"]) == "gloo"
    assert backend_for(["cpu", "cpu"]) == "gloo"


# Ranks that are started so

SCRIPT = """
    import torch
    from plain import make_batch, make_stage, momentum, squared_error
    from stagewright.engine import Pipeline, from_environment, under_launcher

    assert under_launcher()
    with from_environment() as context:
        with Pipeline(make_stage, schedule="1f1b", num_microbatches=4, loss_fn=squared_error, optimizer=momentum,
                      transport=context.transport, share_loss=True) as pipe:
            loss = pipe.train_step(*make_batch(8, 0)).item()
    print(context.rank, context.num_ranks, context.device, torch.get_num_threads(), loss)
"""


@pytest.mark.parametrize(
    "variables", [srun, pytest.param(open_mpi, marks=pytest.mark.slow), pytest.param(mpich, marks=pytest.mark.slow)]
)
def test_ranks_find_each_other_and_train(variables: Callable[[int, int], Environment], tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(dedent(SCRIPT))
    port = {} if variables is srun else {"MASTER_PORT": free_port()}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(file)],
            env=environment(**variables(rank, 2), CUDA_VISIBLE_DEVICES="", **port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=120) for rank in ranks]
    assert [err for _, err in printed] == ["", ""]
    (first, second) = (out.split() for out, _ in printed)
    assert [first[:3], second[:3]] == [["0", "2", "cpu"], ["1", "2", "cpu"]]
    assert first[3:] == second[3:], "an equal share of the cores, and one loss"
