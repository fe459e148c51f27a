"""README's command for several machines, on two and three hosts that are namespaces of this machine."""

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
from hosts import NAMES, Hosts, NotPermittedError
from runs import TINY, Run, has_made, losses_in, losses_of, write_text
from sleeping import BACKWARD, FORWARD, NUM_MICROBATCHES

from stagewright.schedules import Costs, create, simulate

Make: TypeAlias = Callable[..., Hosts]
Curve: TypeAlias = Callable[[int], dict[int, float]]

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
(COMMAND,) = re.findall(r"^torchrun --nnodes .*$", re.sub(r"\\\n *", "", README), re.MULTILINE)
NUM_STEPS = 300
# A rank that has a host to itself computes with more threads, which add up in another order.
SAME = 1e-9
# Seconds that a message takes to another host.
DELAY = 0.02

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[Make]:
    """Divides this machine; the test is skipped where that is not permitted."""
    made: list[Hosts] = []

    def make(num_hosts: int, delays: Sequence[float] = ()) -> Hosts:
        try:
            made.append(Hosts(tmp_path, num_hosts, delays).__enter__())
        except NotPermittedError as error:
            pytest.skip(f"this machine cannot be divided into hosts: {error}")
        return made[-1]

    yield make
    for hosts in made:
        hosts.__exit__()


def flags(text: Path, folder: Path) -> str:
    return f"{TINY} --data {text} --steps {NUM_STEPS} --metrics {folder}/metrics.jsonl --quiet"


def command(text: Path, folder: Path, num_hosts: int = 2) -> str:
    """README's, for a small model, a folder of the test's, and less patience."""
    line = COMMAND.replace("FIRST", NAMES[0])
    changes = (("nnodes", num_hosts), ("save", f"{folder}/run"), ("save-every", 10), ("timeout", 10))
    for flag, value in changes:
        line, count = re.subn(f"--{flag} \\S+", f"--{flag} {value}", line)
        assert count == 1
    return f"{line} {flags(text, folder)}"


@pytest.fixture(scope="module")
def on_one_host(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """The losses of so many ranks that this machine starts by itself."""
    curves: dict[int, dict[int, float]] = {}

    def losses(num_ranks: int) -> dict[int, float]:
        if num_ranks not in curves:
            folder = tmp_path_factory.mktemp("alone")
            Run(f"stagewright train --ranks {num_ranks} {flags(text, folder)}").finish()
            curves[num_ranks] = losses_in(folder / "metrics.jsonl")
            assert curves[num_ranks].keys() == set(range(1, NUM_STEPS + 1))
        return curves[num_ranks]

    return losses


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_hosts_train_together_with_the_losses_of_one(
    num_hosts: int, text: Path, tmp_path: Path, make_hosts: Make, on_one_host: Curve
) -> None:
    hosts = make_hosts(num_hosts)
    runs = [hosts.run(index, command(text, tmp_path, num_hosts)) for index in range(num_hosts)]
    assert sum("validation loss" in run.finish() for run in runs) == 1, "one rank reports"
    assert losses_in(tmp_path / "metrics.jsonl") == pytest.approx(on_one_host(num_hosts), rel=SAME)


def test_a_rank_that_is_killed_on_any_host_changes_nothing(
    text: Path, tmp_path: Path, make_hosts: Make, on_one_host: Curve
) -> None:
    """Also the second time, when torchrun counts restarts differently on each host."""
    hosts, metrics = make_hosts(2), tmp_path / "metrics.jsonl"
    runs = [hosts.run(index, command(text, tmp_path)) for index in range(2)]
    for victim in (1, 0):
        runs[0].wait_until(partial(has_made, metrics, len(losses_of(metrics)) + 30))
        os.kill((runs[0].ranks() | runs[1].ranks())[victim], signal.SIGKILL)
    check_unbroken(runs, metrics, on_one_host(2))


def test_a_host_that_goes_ends_the_others_and_the_command_goes_on_when_it_is_started_again(
    text: Path, tmp_path: Path, make_hosts: Make, on_one_host: Curve
) -> None:
    """With its torchrun and all, of which torchrun on the other host knows nothing for long."""
    hosts, metrics = make_hosts(2), tmp_path / "metrics.jsonl"
    runs = [hosts.run(index, command(text, tmp_path)) for index in range(2)]
    runs[0].wait_until(partial(has_made, metrics, 30))
    (lost,) = runs[1].ranks()
    runs[1].end()
    runs[0].wait_until(partial(has_told, runs[0], f"PeerError: rank {lost} failed "))
    runs[0].end()
    check_unbroken([hosts.run(index, command(text, tmp_path)) for index in range(2)], metrics, on_one_host(2))


def test_a_link_that_goes_down_names_the_rank_behind_it_and_the_run_goes_on_when_it_is_back(
    text: Path, tmp_path: Path, make_hosts: Make, on_one_host: Curve
) -> None:
    hosts, metrics = make_hosts(2), tmp_path / "metrics.jsonl"
    runs = [hosts.run(index, command(text, tmp_path)) for index in range(2)]
    runs[0].wait_until(partial(has_made, metrics, 30))
    (rank,), (other) = (list(run.ranks()) for run in runs)
    hosts.links[1].cut()
    for run, lost in zip(runs, (*other, rank)):
        run.wait_until(partial(has_told, run, f"PeerError: rank {lost} does not answer; "))
    assert len(losses_in(metrics)) < NUM_STEPS
    hosts.links[1].mend()
    check_unbroken(runs, metrics, on_one_host(2))


def test_a_delay_between_hosts_makes_the_bubble_that_the_simulator_says(make_hosts: Make) -> None:
    program = create("1f1b", num_ranks=2, num_microbatches=NUM_MICROBATCHES).program()
    predicted, measured = [], []
    for delay in (0.0, DELAY):
        hosts = make_hosts(2, [delay])
        line = f"torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint {NAMES[0]}:29500"
        script = f"{line} {Path(__file__).parent / 'sleeping.py'}"
        runs = [hosts.run(index, script) for index in range(2)]
        measured.append(float("".join(run.finish() for run in runs)))
        costs = Costs(forward=FORWARD, backward=BACKWARD, send=delay)
        predicted.append(simulate(program, costs).bubble_fraction)
    assert measured == pytest.approx(predicted, abs=0.02)
    assert predicted[1] - predicted[0] > 0.08, "which is much more than that"


def has_told(run: Run, words: str) -> bool:
    """Whether a run has complained in these words."""
    return words in run.err


def check_unbroken(runs: Sequence[Run], metrics: Path, losses: dict[int, float]) -> None:
    """All come to their end, and every step has the loss it would have had, also where it was made again."""
    for run in runs:
        run.finish()
    made = losses_of(metrics)
    assert {step for step, _ in made} == losses.keys()
    assert all(loss == pytest.approx(losses[step], rel=SAME) for step, loss in made)
