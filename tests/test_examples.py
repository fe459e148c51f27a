"""The examples of embedding: short, the same on threads, processes and under torchrun, and learning something."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stagewright.engine import launch_local
from stagewright.models import GPTConfig

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
HUGGING_FACE = EXAMPLES / "hugging_face_style.py"
TORCHTITAN = EXAMPLES / "torchtitan_style.py"


def load(file: Path) -> ModuleType:
    """An example as a module."""
    specification = importlib.util.spec_from_file_location(file.stem, file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[file.stem] = module  # where dataclasses look themselves up
    specification.loader.exec_module(module)
    return module


def run(*command: str | Path) -> str:
    """What a command prints; Python and torchrun are those of this environment."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize("file", [HUGGING_FACE, TORCHTITAN], ids=lambda file: file.stem)
def test_an_example_is_short_and_linked_to(file: Path) -> None:
    assert len(file.read_text().splitlines()) < 80
    assert f"examples/{file.name}" in (ROOT / "README.md").read_text()


# In the style of Hugging Face


def hugging_face(num_ranks: int, *callbacks: object, **changes: object) -> list[dict[str, float]]:
    """What every rank returns."""
    example = load(HUGGING_FACE)
    rows = [(example.torch.arange(17) * (row % 5 + 1) + row) % 32 for row in range(256)]
    setup = (example.TrainingArguments(**changes), GPTConfig(32, 4, 32, 2, 16), rows, callbacks)
    return launch_local(example.train, num_ranks, backend="threads", args=setup)


class Heard:
    """A callback that remembers."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, dict[str, float]]] = []

    def on_log(self, step: int, logs: dict[str, float]) -> None:
        self.heard.append((step, dict(logs)))


def test_the_loop_of_hugging_face_s_style_learns_alike_on_any_schedule() -> None:
    alone, several = Heard(), Heard()
    hugging_face(1, alone)
    hugging_face(2, several, schedule="zbv")
    assert [step for step, _ in several.heard] == list(range(1, 21)), "one rank logs, and it has the loss"
    for (_, logs), (_, expected) in zip(several.heard, alone.heard):
        assert logs == pytest.approx(expected, rel=1e-3)
    losses = [logs["loss"] for _, logs in alone.heard]
    assert losses[-1] < losses[0] - 0.5
    rates = [logs["learning_rate"] for _, logs in alone.heard]
    assert rates == pytest.approx([3e-3 * (1 - step / 20) for step in range(20)])


def test_accumulated_batches_are_one_larger_batch() -> None:
    two, one = Heard(), Heard()
    hugging_face(2, two, max_steps=4)
    hugging_face(2, one, max_steps=4, train_batch_size=32, gradient_accumulation_steps=1)
    for (_, logs), (_, expected) in zip(two.heard, one.heard):
        assert logs == pytest.approx(expected, rel=1e-3)


def test_the_callback_writes_the_loss_where_it_lives(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="writes curves with the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    heard = Heard()
    hugging_face(2, load(HUGGING_FACE).TensorBoardCallback(str(tmp_path)), heard, max_steps=2)
    written: dict[str, dict[int, float]] = {}
    for file in tmp_path.iterdir():
        events = EventAccumulator(str(file)).Reload()
        for name in events.Tags()["scalars"]:
            written.setdefault(name, {}).update({point.step: point.value for point in events.Scalars(name)})
    expected = {name: {step: logs[name] for step, logs in heard.heard} for name in heard.heard[0][1]}
    assert written.keys() == expected.keys()
    for name, points in expected.items():
        assert written[name] == pytest.approx(points, rel=1e-5)


@pytest.mark.slow
def test_the_loop_of_hugging_face_s_style_runs_plainly_and_under_torchrun() -> None:
    plainly = run(HUGGING_FACE)
    assert sorted(run(*TORCHRUN, HUGGING_FACE).splitlines()) == plainly.splitlines() * 2
    (of_threads, _) = hugging_face(2)
    (loss,) = re.findall(r"'loss': ([\d.]+)", plainly)
    assert float(loss) == pytest.approx(of_threads["loss"], rel=1e-3)


# In the style of torchtitan


@pytest.mark.parametrize(
    "schedule",
    ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "zb-h1"],
)
def test_the_trainer_of_torchtitan_s_style_takes_every_schedule(
    schedule: str, capfd: pytest.CaptureFixture[str]
) -> None:
    example = load(TORCHTITAN)
    flags = ["--parallelism.pipeline_parallel_schedule", schedule, "--training.steps", "10"]
    losses = launch_local(example.train, 2, backend="threads", args=(example.read_config(flags),))
    alone = example.read_config([*flags[2:], "--parallelism.pipeline_parallel_degree", "1"])
    alone.parallelism.pipeline_parallel_schedule = "1F1B"
    (expected,) = launch_local(example.train, 1, backend="threads", args=(alone,))
    assert [loss for loss in losses if loss is not None] == [pytest.approx(expected, abs=1e-4)]
    assert capfd.readouterr().out.count("step: 10") == 2, "one rank of each run has the loss, and logs it"


def test_a_file_of_one_s_own_is_read(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(TORCHTITAN.with_suffix(".toml").read_text().replace("steps = 20", "steps = 7"))
    config = load(TORCHTITAN).read_config(["--job.config_file", str(file), "--training.lr", "0.5"])
    assert (config.training.steps, config.training.lr) == (7, 0.5)
    assert config.parallelism.pipeline_parallel_schedule == "Interleaved1F1B"


@pytest.mark.slow
def test_the_trainer_of_torchtitan_s_style_runs_under_torchrun() -> None:
    under_torchrun = run(*TORCHRUN, TORCHTITAN, "--training.steps", "10")
    assert re.findall(r"step: (\d+)", under_torchrun) == ["5", "10"]


@pytest.mark.slow
def test_the_trainer_of_torchtitan_s_style_runs_plainly() -> None:
    assert re.findall(r"step: (\d+)", run(TORCHTITAN)) == ["5", "10", "15", "20"]
