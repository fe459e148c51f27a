"""What launchers that are not on this machine tell the ranks that they start."""

import os
import socket

Environment = dict[str, str]


def srun(rank: int, num_ranks: int, nodes: str = "node01", job: int = 4711) -> Environment:
    """SLURM: a step whose tasks are all on the first of these nodes, or one on each."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(num_ranks),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    }


def open_mpi(rank: int, num_ranks: int, num_local_ranks: int | None = None) -> Environment:
    """mpirun of Open MPI."""
    num_local_ranks = num_local_ranks or num_ranks
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(num_ranks),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % num_local_ranks),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(num_local_ranks),
        "PMIX_NAMESPACE": f"prterun-here-{os.getpid()}@1",
    }


def mpich(rank: int, num_ranks: int, num_local_ranks: int | None = None) -> Environment:
    """mpirun of MPICH, and of Intel MPI."""
    num_local_ranks = num_local_ranks or num_ranks
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(num_ranks),
        "MPI_LOCALRANKID": str(rank % num_local_ranks),
        "MPI_LOCALNRANKS": str(num_local_ranks),
    }


def torchrun(rank: int, num_ranks: int, num_local_ranks: int | None = None) -> Environment:
    """torchrun."""
    num_local_ranks = num_local_ranks or num_ranks
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank % num_local_ranks),
        "LOCAL_WORLD_SIZE": str(num_local_ranks),
        "MASTER_ADDR": "first",
        "MASTER_PORT": "29501",
        "TORCHELASTIC_RUN_ID": "none",
    }


def free_port() -> str:
    """A port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])
