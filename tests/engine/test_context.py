"""The ranks of torchrun and alike: each finds itself, they train together, and an error ends them all."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch.distributed as dist

from stagewright.engine import from_environment, launch_local, under_torchrun
from stagewright.engine.launch.context import default_transport, num_cores

HERE = Path(__file__).parent
TRAIN = """
    import sys
    import torch
    from plain import make_batch, make_stage, momentum, squared_error
    from stagewright.engine import Pipeline, from_environment

    def train(context):
        losses = []
        with Pipeline(make_stage, schedule="1f1b", num_microbatches=4, loss_fn=squared_error, optimizer=momentum,
                      transport=context.transport, share_loss=True) as pipe:
            for step in range(3):
                losses.append(pipe.train_step(*make_batch(8, step)).item())
        return losses
"""
FAIL = """
    from failing import fail_in_step
    from stagewright.engine import from_environment

    with from_environment() as context:
        fail_in_step(context, "forward")
"""


def write(tmp_path: Path, script: str) -> str:
    file = tmp_path / "script.py"
    file.write_text(dedent(script))
    return str(file)


def environment(**variables: str) -> dict[str, str]:
    """As it is, with the helpers of these tests importable."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**inherited, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]), **variables}


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def torchrun(file: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        free_port(),
        file,
    ]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)


def by_hand(file: str, num_ranks: int) -> list[tuple[str, str, int]]:
    """Start the ranks with the variables alone, without anyone who watches over them; what each printed, and how."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, file],
            env=environment(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    return [(*rank.communicate(timeout=120), rank.returncode) for rank in ranks]


@pytest.mark.slow
def test_training_under_torchrun_is_the_same(tmp_path: Path) -> None:
    script = dedent(TRAIN) + dedent("""
        with from_environment() as context:
            sys.stdout.write(f"{context.rank} {context.num_ranks} {torch.get_num_threads()} {train(context)}\\n")
    """)
    run = torchrun(write(tmp_path, script))
    assert run.returncode == 0, run.stderr
    names: dict[str, object] = {}
    exec(compile(dedent(TRAIN), "script", "exec"), names)
    losses = launch_local(names["train"], 2, backend="threads")  # type: ignore[arg-type]
    threads = max(1, num_cores() // 2)
    assert sorted(run.stdout.splitlines()) == [f"{rank} 2 {threads} {losses[rank]}" for rank in range(2)]


def test_without_a_watcher_every_rank_ends_with_an_error_that_names_the_failed_one(tmp_path: Path) -> None:
    (_, first, code), (_, second, other_code) = by_hand(write(tmp_path, FAIL), 2)
    assert (code, other_code) == (1, 1)
    assert "PeerError: rank 1 failed at 1F2 (step 1): ValueError: boom in forward" in first
    assert "ValueError: boom in forward\nrank 1 failed at 1F2 (step 1)" in second.replace("[rank1]: ", "")


@pytest.mark.slow
@pytest.mark.parametrize("death", ["os._exit(5)", "os.kill(os.getpid(), 9)"])
def test_without_a_watcher_a_rank_that_dies_is_named(tmp_path: Path, death: str) -> None:
    script = f"""
        import os
        from stagewright.engine import from_environment

        with from_environment() as context:
            context.transport.gather(b"")
            if context.rank == 1:
                {death}
            context.transport.gather(b"")
    """
    (_, seen, code), (_, _, other_code) = by_hand(write(tmp_path, script), 2)
    assert "PeerError: rank 1 failed before its first step: its process has gone" in seen
    assert (code, other_code) in ((1, 5), (1, -9))


@pytest.mark.slow
def test_who_waits_for_a_rank_that_has_returned_is_told(tmp_path: Path) -> None:
    script = """
        from failing import return_early
        from stagewright.engine import from_environment

        with from_environment() as context:
            return_early(context)
    """
    for _, seen, code in by_hand(write(tmp_path, script), 2):
        assert "rank 1 has returned while another rank still waits for what it sends" in seen
        assert code == 1


@pytest.mark.slow
@pytest.mark.skipif(num_cores() < 2, reason="torch takes no more threads than there are cores")
def test_what_a_user_says_about_threads_counts(tmp_path: Path) -> None:
    script = """
        import torch
        from stagewright.engine import from_environment

        with from_environment():
            print(torch.get_num_threads())
    """
    where = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    run = subprocess.run(
        [sys.executable, write(tmp_path, script)],
        env=environment(OMP_NUM_THREADS="2", LOCAL_WORLD_SIZE=str(num_cores()), **where),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.stdout == "2\n", run.stderr


def test_outside_of_torchrun_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert not under_torchrun()
    with (
        pytest.raises(ValueError, match="RANK and WORLD_SIZE are not set: start this with torchrun"),
        from_environment(),
    ):
        pass


def test_a_single_rank_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    transport = default_transport()
    assert (transport.rank, transport.num_ranks, transport.gather(b"alone")) == (0, 1, [b"alone"])
