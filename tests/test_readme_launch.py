"""README's commands that start ranks are run as they stand there, for srun and mpirun with stand-ins for these."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import free_port
from launchers import MACHINES, install

from stagewright.cli.train_arguments import TRAIN_EXAMPLES

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = [re.sub(r"\\\n *", "", block) for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)]
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith(("torchrun", "srun", "mpirun"))]
# Those that save are for runs that are interrupted: see tests/cli/test_restart.py and tests/test_hosts.py.
PLAIN, LASTING = ([line for line in COMMANDS if ("--save" in line) == lasting] for lasting in (False, True))


def start(command: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    """Run a line as someone would who has activated the environment; FIRST and SECOND are names of this machine."""
    for name, machine in zip(("FIRST", "SECOND"), MACHINES):
        command = command.replace(name, machine)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Ranks that take themselves for alone on their machine share its cores here: let their threads not spin.
        env={**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE", **variables},
    )


def losses(out: str) -> list[str]:
    """The losses of the closing table, which one rank prints."""
    assert out.count("validation loss") == 1
    return re.findall(r"loss(?:, first step|, last step|) {2,}(\d+\.\d{4})", out)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The losses of ranks that the command starts by itself."""
    out, err = start("stagewright train --steps 20", tmp_path_factory.mktemp("plain")).communicate(timeout=240)
    assert err == ""
    assert len(losses(out)) == 3
    return losses(out)


def test_the_help_shows_the_same_commands() -> None:
    assert len(PLAIN) == 4
    assert len(LASTING) == 2
    help_text = re.sub(r"\\\n *", "", TRAIN_EXAMPLES)
    for command in (*LASTING, *(line for line in PLAIN if "FIRST" not in line)):
        assert command.removesuffix(" --steps 20") in help_text


@pytest.mark.slow
@pytest.mark.parametrize("command", PLAIN)
def test_a_command_trains_on_the_ranks_it_starts(command: str, tmp_path: Path, expected: list[str]) -> None:
    install(tmp_path)
    # torchrun takes its flags from such variables too; the port it has by itself may be taken.
    out, err = start(command, tmp_path, PET_MASTER_PORT=free_port()).communicate(timeout=240)
    assert losses(out) == expected, err


@pytest.mark.slow
def test_one_command_on_two_machines(tmp_path: Path, expected: list[str]) -> None:
    """On one that answers to both names; tests/test_hosts.py has hosts with networks of their own."""
    (command,) = (line for line in LASTING if "FIRST" in line)
    command = f"{command.replace('29500', free_port()).replace('--save run', f'--save {tmp_path}/run')} --steps 20"
    machines = [start(command, tmp_path) for _ in range(2)]
    outs, errs = zip(*(machine.communicate(timeout=240) for machine in machines))
    assert losses("".join(outs)) == expected, errs


@pytest.mark.slow
def test_ctrl_c_gets_one_line_of_ours(tmp_path: Path) -> None:
    """torchrun's own traceback comes with it, and is not ours to leave out."""
    running = start("torchrun --standalone --nproc-per-node 2 -m stagewright.cli train --steps 100000", tmp_path)
    assert running.stdout is not None
    assert any(line.startswith("step") for line in iter(running.stdout.readline, ""))
    os.killpg(running.pid, signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert err.count("interrupted") == 1
    assert "KeyboardInterrupt" not in err
    assert err.count("Traceback") == err.count("SignalException:") == 1
