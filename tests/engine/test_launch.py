"""Launching on this machine: results come in order, the error that matters is raised, and nothing is left."""

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from failing import (
    describe,
    end_abruptly,
    end_while_another_is_busy,
    fail_in_step,
    fail_in_user_code,
    many_tensors,
    raise_unpicklable,
    return_early,
    return_unpicklable,
    tell_what_was_seen,
    variable,
)

from stagewright.engine import PeerError, RankError, launch_local
from stagewright.engine.launch.context import num_cores

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at /proc for what is left")


def belongings() -> tuple[set[int | None], int, int]:
    """This process's children, its threads of any kind, and its sockets."""
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink() and entry.exists()]
    threads = len(list(Path("/proc/self/task").iterdir()))
    return {child.pid for child in mp.active_children()}, threads, sum(link.startswith("socket:") for link in links)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """What other tests have left may end meanwhile; what a launch has started has ended when it returns."""
    children, threads, sockets = belongings()
    yield
    children_left, threads_left, sockets_left = belongings()
    assert children_left <= children
    assert threads_left <= threads
    assert sockets_left <= sockets


def read_above(error: BaseException) -> str:
    """What a user reads above the error: one traceback, from the launcher's call to the line in the rank."""
    text = "".join(traceback.format_exception(error))
    assert text.count("Traceback (most recent call last)") == 1
    return text


# Results


def test_every_rank_is_a_process_with_its_share_and_its_own_arguments() -> None:
    tensor = torch.zeros(2, dtype=torch.int64)
    results = launch_local(describe, 3, args=(tensor,))
    threads = max(1, num_cores() // 3)
    assert results == [(rank, 3, rank, threads, [rank, rank], [1, 2, 3], True) for rank in range(3)]
    assert tensor.tolist() == [0, 0], "the launcher's own is as it was"


def test_a_single_rank_and_more_tensors_than_open_files() -> None:
    (tensors,) = launch_local(many_tensors, 1, args=(3000,))
    assert [tensor.tolist() for tensor in tensors] == [[0, index] for index in range(3000)]


@pytest.mark.parametrize(
    ("given", "found"), [({}, "1000"), pytest.param({"OMP_WAIT_POLICY": "ACTIVE"}, None, marks=pytest.mark.slow)]
)
def test_threads_of_ranks_soon_leave_their_cores_to_others_unless_told_how_to_wait(
    given: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left to themselves they spin, and a rank of several threads crawls on a machine with other work to do."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert launch_local(variable, 1, args=("GOMP_SPINCOUNT",)) == [found]
    assert dict(os.environ) == before, "the launcher's own is as it was"


@pytest.mark.parametrize("num_ranks", [0, -1])
def test_a_pipeline_has_ranks(num_ranks: int) -> None:
    with pytest.raises(ValueError, match=f"at least one rank: got num_ranks={num_ranks}"):
        launch_local(describe, num_ranks)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="gloo or threads: got 'mpi'"):
        launch_local(describe, 1, backend="mpi")  # type: ignore[arg-type]


# Errors


@pytest.mark.parametrize(("where", "instruction"), [("forward", "1F2"), ("backward", "1B2"), ("optimizer", "1STEP@1")])
def test_an_error_in_a_step_is_raised_with_its_type_place_and_traceback(where: str, instruction: str) -> None:
    with pytest.raises(ValueError, match=f"^boom in {where}") as caught:
        launch_local(fail_in_step, 2, args=(where,))
    assert caught.value.__notes__ == [f"rank 1 failed at {instruction} (step 1)"]
    assert f'raise ValueError("boom in {where}")' in read_above(caught.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("_exit", r"^rank 1 exited with code 3 before it returned(\n|$)"),
        ("kill", r"^rank 1 was ended by signal 9 .* before it returned(\n|$)"),
        pytest.param("exit", r"^SystemExit: 0\nin rank 1$", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_ends_without_an_error_is_named(how: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        launch_local(end_abruptly, 2, args=(how,))


def test_an_error_ends_a_rank_that_is_busy() -> None:
    with pytest.raises(KeyError, match="boom"):
        launch_local(end_while_another_is_busy, 2)


def test_an_error_is_raised_and_not_what_others_suffer_from_it() -> None:
    with pytest.raises(OSError, match="boom on a disk") as caught:
        launch_local(fail_in_user_code, 2)
    assert caught.value.errno == 5


def test_an_error_that_cannot_be_pickled_is_told() -> None:
    with pytest.raises(RankError, match="^HasLock: boom with a lock") as caught:
        launch_local(raise_unpicklable, 1)
    assert caught.value.__notes__ == ["a note", "in rank 0"]
    assert "raise error" in read_above(caught.value)


def test_a_result_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(TypeError, match="rank 0 returned a lock that cannot be brought to the launcher"):
        launch_local(return_unpicklable, 1)


def test_a_function_that_cannot_be_pickled_is_refused_before_anything_starts() -> None:
    with pytest.raises(TypeError, match=r"define the function at the top of a file .* or use backend='threads'"):
        launch_local(lambda context: None, 2)
    with pytest.raises(TypeError, match="pass it what can be pickled"):
        launch_local(describe, 2, args=(threading.Lock(),))


def test_every_other_rank_sees_an_error_that_names_the_failed_rank_and_its_instruction() -> None:
    """Here all ranks go on after it; and what has failed once fails at once from then on."""
    told = "rank 1 failed at 1F2 (step 1): ValueError: boom in forward"
    assert launch_local(tell_what_was_seen, 3, args=("forward",)) == [
        f"PeerError: {told}",
        "ValueError: boom in forward",
        f"PeerError: {told}",
    ]


def test_who_waits_for_a_rank_that_has_returned_is_told() -> None:
    """Once it waited until the group's time-out, half an hour, for a message that nobody would send."""
    with pytest.raises(PeerError, match="rank 1 has returned while another rank still waits for what it sends"):
        launch_local(return_early, 3)


# Scripts


def start(script: str, tmp_path: Path, *command: str) -> subprocess.Popen[str]:
    """Run a script as a user would, in a session of its own as a terminal gives it one."""
    file = tmp_path / "script.py"
    file.write_text(dedent(script))
    return subprocess.Popen(
        [sys.executable, *(command or (str(file),))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def members_of(session: int) -> set[int]:
    """The processes of a session that are still running."""
    members = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                _, _, status = (entry / "stat").read_text().rpartition(") ")
            except OSError:
                continue  # it has just gone
            state, _, _, its_session, *_ = status.split()
            if int(its_session) == session and state != "Z":
                members.add(int(entry.name))
    return members


def wait_until_gone(session: int, seconds: float = 20) -> set[int]:
    """Those of a session that are left after some time."""
    deadline = time.monotonic() + seconds
    while (members := members_of(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return members


WAITING = """
    import sys
    import time
    from stagewright.engine import launch_local

    def wait(context):
        context.transport.gather(b"")
        if context.rank == 0:
            print("ready", flush=True)
            time.sleep(600)
        context.transport.gather(b"")

    if __name__ == "__main__":
        try:
            launch_local(wait, 2)
        except KeyboardInterrupt:
            sys.exit("interrupted")
"""


def test_ctrl_c_ends_everything_with_one_line(tmp_path: Path) -> None:
    launcher = start(WAITING, tmp_path)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    os.killpg(launcher.pid, signal.SIGINT)
    out, err = launcher.communicate(timeout=20)
    assert (out, err, launcher.returncode) == ("", "interrupted\n", 1)
    assert not wait_until_gone(launcher.pid)


def test_ctrl_c_while_ranks_start_ends_everything_with_one_line(tmp_path: Path) -> None:
    launcher = start(WAITING.replace("launch_local(wait", 'print("starting", flush=True); launch_local(wait'), tmp_path)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "starting\n"
    while len(members_of(launcher.pid)) < 4:  # the launcher, two ranks and multiprocessing's own helper
        time.sleep(0.01)
    os.killpg(launcher.pid, signal.SIGINT)
    out, err = launcher.communicate(timeout=20)
    assert (out, err, launcher.returncode) == ("", "interrupted\n", 1)
    assert not wait_until_gone(launcher.pid)


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher = start(WAITING, tmp_path)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    assert len(members_of(launcher.pid)) >= 3
    launcher.kill()
    assert not wait_until_gone(launcher.pid)
    _, err = launcher.communicate(timeout=20)
    assert err == ""


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    script = """
        from stagewright.engine import launch_local

        def work(context):
            return context.rank

        print("imported", flush=True)
        launch_local(work, 2)
    """
    launcher = start(script, tmp_path)
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert err.count("Traceback") == 1
    assert 'if __name__ == "__main__":' in err
    assert out.count("imported") <= 3
    assert not wait_until_gone(launcher.pid)


@pytest.mark.slow
def test_a_function_from_the_command_line_is_told_to_be_put_in_a_file(tmp_path: Path) -> None:
    script = "from stagewright.engine import launch_local\ndef work(context): pass\nlaunch_local(work, 1)"
    launcher = start("", tmp_path, "-c", script)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "write it to a file, or use backend='threads'" in err.splitlines()[-1]
