"""Stand-ins for srun and mpirun, which this machine need not have: they start every rank here, as if on its machine.

`python launchers.py srun --nodes 2 --ntasks-per-node 1 COMMAND …`; machines have names that this one answers to.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

MACHINES = ("127.0.0.1", "127.0.0.2")


def srun(arguments: list[str]) -> tuple[list[str], list[dict[str, str]]]:
    """The command, and what SLURM would tell each of its tasks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--ntasks-per-node", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    parsed = parser.parse_args(arguments)
    num_ranks = parsed.nodes * parsed.ntasks_per_node
    of_ranks = [
        {
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": f"127.0.0.[1-{parsed.nodes}]",
            "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",  # somewhere else
            "SLURM_NTASKS": str(num_ranks),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % parsed.ntasks_per_node),
        }
        for rank in range(num_ranks)
    ]
    return parsed.command, of_ranks


def mpirun(arguments: list[str]) -> tuple[list[str], list[dict[str, str]]]:
    """The command, and what Open MPI would tell each of its ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-np", type=int)
    parser.add_argument("--host", default=MACHINES[0], type=lambda hosts: hosts.split(","))
    parser.add_argument("-x", action="append", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    parsed = parser.parse_args(arguments)
    num_local = parsed.np // len(parsed.host)
    exported = dict(assignment.split("=") for assignment in parsed.x)
    of_ranks = [
        exported
        | {
            "OMPI_COMM_WORLD_SIZE": str(parsed.np),
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(num_local),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % num_local),
            "PMIX_NAMESPACE": f"prterun-{os.getpid()}@1",
        }
        for rank in range(parsed.np)
    ]
    return parsed.command, of_ranks


def install(folder: Path) -> None:
    """Put both into a folder as commands."""
    for name in ("srun", "mpirun"):
        file = folder / name
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        file.chmod(0o755)


if __name__ == "__main__":
    command, of_ranks = {"srun": srun, "mpirun": mpirun}[sys.argv[1]](sys.argv[2:])
    ranks = [subprocess.Popen(command, env={**os.environ, **variables}) for variables in of_ranks]
    sys.exit(max(rank.wait() for rank in ranks))
