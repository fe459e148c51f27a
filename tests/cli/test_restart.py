"""README's command for runs that go on by themselves: whatever rank dies at whatever step, the losses stay the same."""

import os
import random
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from launched import free_port
from runs import TINY, Run, has_made, losses_of, write_text

README = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")
(COMMAND,) = re.findall(r"^torchrun --nproc-per-node .*--max-restarts.*$", README, re.MULTILINE)
NUM_STEPS = 1000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture(scope="module")
def unbroken(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], str]:
    """The losses of all steps of a run that nothing breaks, and what its table says of losses at the end."""
    folder = tmp_path_factory.mktemp("unbroken")
    out = Run(command(text, folder)).finish()
    losses = losses_of(folder / "metrics.jsonl")
    assert [step for step, _ in losses] == list(range(1, NUM_STEPS + 1))
    return [loss for _, loss in losses], losses_at_the_end(out)


def command(text: Path, folder: Path, max_restarts: int = 3) -> str:
    """README's, for a small model, a folder of the test's, and a port that is free."""
    line = COMMAND
    for flag, value in (("max-restarts", max_restarts), ("save", f"{folder}/run"), ("save-every", 10)):
        line, count = re.subn(f"--{flag} \\S+", f"--{flag} {value}", line)
        assert count == 1
    own = f"{TINY} --data {text} --steps {NUM_STEPS} --metrics {folder}/metrics.jsonl --quiet"
    return f"{line.replace('torchrun ', f'torchrun --master-port {free_port()} ')} {own}"


def losses_at_the_end(out: str) -> str:
    """The lines that must be the same, however often a run was broken."""
    lines = [line for line in out.splitlines() if re.match("(training loss, last step|validation loss)", line)]
    assert len(lines) == 2
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("num_kills", "max_restarts"), [(3, 3), (20, 24)], ids=["as often as README allows", "twenty times"]
)
def test_a_rank_that_is_killed_changes_nothing(
    num_kills: int, max_restarts: int, text: Path, tmp_path: Path, runs: list[Run], unbroken: tuple[list[float], str]
) -> None:
    """At a random step, and every fifth time once more while ranks are about to start."""
    line, metrics, chosen = command(text, tmp_path, max_restarts), tmp_path / "metrics.jsonl", random.Random(num_kills)
    run = Run(line)
    runs.append(run)
    for number in range(num_kills):
        run.wait_until(partial(has_made, metrics, len(losses_of(metrics)) + chosen.randrange(1, 40)))
        os.kill(run.ranks()[chosen.randrange(2)], signal.SIGKILL)
        if number % 5 == 4:
            time.sleep(chosen.uniform(0.5, 4.0))
            run.wait_until(lambda: len(run.ranks()) == 2)
            os.kill(run.ranks()[chosen.randrange(2)], signal.SIGKILL)
    out = run.finish()
    losses, at_the_end = unbroken
    made = losses_of(metrics)
    assert {step for step, _ in made} == set(range(1, NUM_STEPS + 1))
    assert all(loss == losses[step - 1] for step, loss in made), "also where a step was made again"
    assert losses_at_the_end(out) == at_the_end
    assert run.has_left_nothing()
    assert Run(line).finish().count("nothing is left to do") == 1
