"""One rank dies, in every way and at any instruction: all others end, and name that rank and what it did last."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from dying import CHECKPOINT, PLACES, RANK, REDUCTION, STEP, Death, How, fail_by_hand, get_stuck, train_and_die
from launched import free_port
from launching import launch_on

from stagewright.engine import PeerError, RankError, launch_local

HERE = Path(__file__).parent
# What the dying rank raises, or how the launcher says that it has ended.
LAUNCHER: Mapping[How, str] = {
    "raise": "^boom",
    "memory": "no memory is left for boom",
    "exit": "rank 1 exited with code 7 before it returned",
    "kill": r"rank 1 was ended by signal 9 \(Killed\) before it returned",
    "stop": "rank 1 does not answer; ",
}
WHERE = [*PLACES.values(), CHECKPOINT]


def expected(death: Death) -> str:
    """What every other rank says, from its beginning."""
    replica = " of replica 0" if death.dp > 1 else ""
    at = "after step 1" if death.where == CHECKPOINT else f"at {death.where} (step 1)"
    last = "it had ended step 1" if death.where == CHECKPOINT else f"its last instruction was {death.where} (step 1)"
    match death.how:
        case "raise":
            return f"rank 1{replica} failed {at}: ValueError: boom"
        case "memory":
            return f"rank 1{replica} failed {at}: OutOfMemoryError: no memory is left for boom"
        case "exit" | "kill":
            return f"rank 1{replica} failed {at}: its process has gone"
        case "stop":
            return f"rank 1{replica} does not answer; {last}"


def possible(death: Death) -> list[str]:
    """All that they may say: an error while a rank saves can come in two ways, as they agree on what was saved, too."""
    agreed = [f"rank 1 cannot save step {STEP + 1}: boom"] if (death.how, death.where) == ("raise", CHECKPOINT) else []
    return [expected(death), *agreed]


def check_folder(folder: Path, death: Death, num_ranks: int) -> None:
    """What the ranks have written down, and that none of them, and with it no port and no file of its own, is left."""
    dying = RANK * death.dp
    for rank in range(num_ranks):
        process = (folder / f"process {rank}").read_text()
        assert not Path("/proc", process).exists()
        assert not [file for file in Path("/dev/shm").iterdir() if process in re.findall(r"\d+", file.name)]
        if rank != dying:
            said = (folder / f"rank {rank}").read_text()
            assert said in [f"PeerError: {reason}" for reason in possible(death)]


def check_launch(death: Death, num_ranks: int, folder: Path) -> None:
    """By ``launch_local``: the error, once and with its traceback where there is one."""
    launcher = expected(death) if death.how == "stop" else LAUNCHER[death.how]
    if death.how in ("exit", "kill"):
        launcher = launcher.replace("rank 1 ", f"rank {RANK * death.dp} ")  # all ranks of all replicas are its own
    with pytest.raises(Exception, match=launcher if death.how != "stop" else re.escape(launcher)) as caught:
        launch_local(train_and_die, num_ranks, args=(death, str(folder)))
    check_folder(folder, death, num_ranks)
    match death.how:
        case "raise" | "memory":
            where = "" if death.where == CHECKPOINT else f" at {death.where} (step 1)"
            assert caught.traceback[-1].name == "die"
            assert any(note.endswith(f" failed{where}") for note in caught.value.__notes__) or not where
        case "exit" | "kill":
            assert type(caught.value) is RankError
            assert caught.value.__notes__ == [expected(death)]
        case "stop":
            assert type(caught.value) is PeerError


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where ranks put temporary files; nothing is left there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert not [file for file in folder.iterdir() if not file.name.startswith("torchinductor")]  # which torch keeps


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_process_that_dies_without_a_word_is_named_with_its_last_instruction(
    how: How, tmp_path: Path, temporary: Path
) -> None:
    check_launch(Death(how, PLACES["steady"]), 3, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [3, 4])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("how", list(LAUNCHER))
def test_every_death_at_any_instruction(how: How, where: str, num_ranks: int, tmp_path: Path, temporary: Path) -> None:
    check_launch(Death(how, where), num_ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", list(LAUNCHER))
def test_a_death_in_the_reduction_is_told_to_all_replicas(how: How, tmp_path: Path, temporary: Path) -> None:
    check_launch(Death(how, REDUCTION, dp=2), 6, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [3, 4])
@pytest.mark.parametrize("how", list(LAUNCHER))
def test_ranks_that_exchange_data_as_from_host_to_host_are_woken_too(how: How, num_ranks: int, tmp_path: Path) -> None:
    check_launch(Death(how, PLACES["cooldown"], shares_memory=False), num_ranks, tmp_path)


def started(death: Death, num_ranks: int, folder: Path, *launcher: str) -> list[subprocess.Popen[str]]:
    """The ranks of a launcher, or without one by their variables alone."""
    script = folder / "script.py"
    script.write_text(
        "import json, sys\nfrom dying import Death, main\nmain(Death(**json.loads(sys.argv[1])), sys.argv[2])\n"
    )
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(num_ranks)}
    environments = [{}] if launcher else [{"RANK": str(rank), **where} for rank in range(num_ranks)]
    command = [sys.executable, *launcher, str(script), json.dumps(asdict(death)), str(folder)]
    return [
        subprocess.Popen(command, env={**inherited, "PYTHONPATH": path, **variables}, stderr=subprocess.PIPE, text=True)
        for variables in environments
    ]


@pytest.mark.slow
@pytest.mark.parametrize("where", [PLACES["steady"], CHECKPOINT])
@pytest.mark.parametrize("how", list(LAUNCHER))
def test_without_a_launcher_that_watches_every_rank_ends_by_itself(how: How, where: str, tmp_path: Path) -> None:
    death = Death(how, where)
    ranks = started(death, 3, tmp_path)
    for rank, process in enumerate(ranks):
        if rank != RANK:
            _, err = process.communicate(timeout=120)
            assert process.returncode == 1
            assert err.count("Traceback (most recent call last)") >= 1
            assert any(reason in err for reason in possible(death))
    if how == "stop":
        ranks[RANK].kill()
    _, err = ranks[RANK].communicate(timeout=120)
    assert ranks[RANK].returncode == (1 if how in ("raise", "memory") else 7 if how == "exit" else -9)
    assert err.count("Traceback (most recent call last)") == (1 if how in ("raise", "memory") else 0)
    check_folder(tmp_path, death, 3)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "exit", "kill", "stop"])
def test_torchrun_ends_with_an_error(how: How, tmp_path: Path) -> None:
    """It ends all other ranks itself, as soon as one has ended; one that is stopped half a minute after that.

    The one that has failed still prints its traceback: the others let it go first.
    """
    death = Death(how, PLACES["steady"])
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", free_port()]
    (process,) = started(death, 3, tmp_path, *launcher)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    lines = [line.removeprefix(f"[rank{RANK}]: ") for line in err.splitlines()]
    told = [index for index, line in enumerate(lines) if expected(death) in line]  # by the others
    if how == "raise":
        end_of_traceback = lines.index("ValueError: boom")
        assert f"rank {RANK} failed at" in lines[end_of_traceback + 1]
        assert all(index > end_of_traceback for index in told)
    elif how == "stop":
        assert told
    else:  # which of the others come to say so before torchrun ends them is a matter of milliseconds
        assert f"local_rank: {RANK} " in err
    for file in tmp_path.glob("process *"):
        assert not Path("/proc", file.read_text()).exists()
    for rank in (0, 2):
        if (file := tmp_path / f"rank {rank}").exists() and (said := file.read_text()):
            assert said == f"PeerError: {expected(death)}"


# What users bring


@pytest.mark.parametrize("num_ranks", [3, 4])
@pytest.mark.parametrize("kind", ["threads", "gloo"])
@pytest.mark.parametrize("fault", ["loss", "loader", "shape", "dtype"])
def test_what_users_bring_fails_on_one_rank_and_ends_all(fault: str, kind: Any, num_ranks: int) -> None:
    said = launch_on(kind, fail_by_hand, num_ranks, (fault,))
    last = num_ranks - 1
    culprit, where = {
        "loss": (last, f"failed at {last}F2 (step 1): ArithmeticError: boom in loss"),
        "loader": (0, "failed after step 0: OSError: [Errno 5] boom in loader"),
        "shape": (RANK + 1, f"failed at {RANK + 1}F2 (step 1): "),
        "dtype": (RANK + 1, f"failed at {RANK + 1}F2 (step 1): "),
    }[fault]
    for rank, text in enumerate(said):
        if rank == culprit:
            assert where.partition(": ")[2] in text
            assert not text.startswith("PeerError")
        else:
            assert text.startswith(f"PeerError: rank {culprit} {where}")


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_a_thread_that_does_not_come_back_is_named_and_given_up(num_ranks: int) -> None:
    is_over = threading.Event()
    said: dict[int, str] = {}
    try:
        with pytest.raises(PeerError, match=r"rank 1 does not go on; for 1 s it has been at 1F2 \(step 1\)"):
            launch_local(get_stuck, num_ranks, backend="threads", args=(is_over, said))
    finally:
        is_over.set()
    assert sorted(said) == [rank for rank in range(num_ranks) if rank != RANK]
    assert set(said.values()) == {"rank 1 does not go on; for 1 s it has been at 1F2 (step 1)"}
