"""The bench of GPUs: all of it runs on a CPU, what waits is found on a pretended GPU, and time that is up ends it."""

import json
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launching import launch_on
from rich.console import Console
from torch import Tensor

from stagewright.bench import gpu, gpu_ranks
from stagewright.bench.gpu import Bench, Budget, main
from stagewright.bench.gpu_device import WAITED, Device, Waits, calls_within, machine_of, place_in
from stagewright.bench.gpu_parts import Part, parts_of, works_on
from stagewright.bench.gpu_ranks import Alone, Shared, Watched, beside_plain, ended_after, shared, waits_of
from stagewright.bench.gpu_report import (
    Found,
    Look,
    Outcome,
    alone_section,
    look_section,
    predicted_bytes,
    shared_section,
)
from stagewright.bench.gpu_work import Kept, Work, kept_by
from stagewright.bench.memory import Allocator
from stagewright.bench.paired import Turn
from stagewright.engine import launch_local
from stagewright.models import GPTConfig, token_loss
from stagewright.schedules import ScheduleError, create, simulate

CONFIG = GPTConfig(vocab_size=16, num_layers=4, hidden_size=8, num_heads=2, sequence_length=4)
WORK = Work(CONFIG, rows=2, num_microbatches=4, device="cpu", num_rounds=2, num_steps=2, dtype=torch.float64)
WORKS = {"tiny": WORK, "large": WORK}
CPU = torch.device("cpu")


@dataclass
class Cuda:
    """A pretended ``torch.cuda`` over the memory of this process, which notes what it is asked to do."""

    mode: str = "default"
    log: list[str] = field(default_factory=list)
    top: int = 0

    def synchronize(self, device: torch.device) -> None:
        self.log.append("wait")

    def set_sync_debug_mode(self, mode: str) -> None:
        self.mode = mode

    def memory_allocated(self, device: torch.device) -> int:
        return Allocator().num_bytes

    def max_memory_allocated(self, device: torch.device) -> int:
        return max(self.top, Allocator().num_bytes)

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.top = 0

    def operate(self) -> None:
        """What torch does in an operation that waits."""
        match self.mode:
            case "warn":
                warnings.warn(WAITED, stacklevel=1)
            case "error":
                raise RuntimeError(WAITED)

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name="A GPU", total_memory=80 * 2**30, multi_processor_count=132)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """Ranks believe that their device is a GPU."""
    pretended = Cuda()
    monkeypatch.setattr(gpu_ranks, "device_of", lambda name: Device(CPU, pretended))
    yield pretended
    assert pretended.mode == "default"


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads of this process."""
    monkeypatch.setattr(gpu, "launch_local", partial(launch_local, backend="threads"))


def waiting_loss(cuda: Cuda, output: Tensor, target: Tensor) -> Tensor:
    cuda.operate()
    return token_loss(output, target)


# What is measured


def test_without_a_gpu_it_says_so_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(tmp_path / "gpu.json")]) == 0
    assert "skipped: the bench of GPUs needs one" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_large_model_has_a_few_hundred_million_weights_in_bf16_and_enough_layers_for_all_schedules() -> None:
    large = works_on("cuda", 8)["large"]
    assert large.num_parameters == pytest.approx(370e6, rel=0.01)
    assert large.dtype is torch.bfloat16
    assert max(part.schedule.num_stages for part in parts_of(4, 8)) <= large.config.num_layers


def test_the_most_important_parts_come_first_and_every_schedule_once() -> None:
    parts = parts_of(4, 8)
    assert list(map(str, parts[:6])) == [
        "alone tiny 1f1b P=1",
        "waits tiny 1f1b P=1",
        "alone large 1f1b P=1",
        "shared large 1f1b P=4",
        "shared large gpipe P=4",
        "waits tiny 1f1b P=4",
    ]
    shared_ones = [part.schedule.name for part in parts if part.kind == "shared"]
    assert len(shared_ones) == len(set(shared_ones))
    assert {"interleaved", "zb-h1", "zbv", "dualpipe", "chimera", "hanayo", "2bw", "pipedream"} <= set(shared_ones)
    assert "seq1f1b" not in shared_ones


def test_a_schedule_that_was_named_and_does_not_serve_the_shape_is_an_error() -> None:
    with pytest.raises(ScheduleError, match="dualpipe"):
        parts_of(3, 6, ["dualpipe"])


def test_on_one_rank_a_pipeline_trains_as_the_plain_loop_beside_it() -> None:
    for name in ("1f1b", "zb-h1", "bfs"):
        schedule = create(name, num_ranks=1, num_microbatches=4)
        (alone,) = launch_on("threads", beside_plain, 1, ("tiny", WORK, schedule, 60.0))
        assert alone.loss == pytest.approx(alone.plain_loss, rel=1e-9)
        assert [len(times) for times in (alone.queued, alone.done, alone.plain_queued, alone.plain_done)] == [4] * 4
        assert all(queued <= done for queued, done in zip(alone.queued, alone.done))
        assert alone.num_instructions == len(schedule.program().streams[0])


def test_ranks_that_share_a_device_train_alike_by_every_schedule_with_a_flush(threads: None, tmp_path: Path) -> None:
    bench = Bench(WORKS, Budget(600), tmp_path / "new" / "gpu.json", Console(quiet=True))
    names = ("1f1b", "zb-h1", "interleaved", "2bw")
    bench.measure([Part("shared", "large", create(name, num_ranks=2, num_microbatches=4)) for name in names])
    losses = {outcome.schedule.name: outcome.loss for outcome in bench.found.shared}
    assert losses["zb-h1"] == pytest.approx(losses["1f1b"], rel=1e-9)
    assert losses["interleaved"] == pytest.approx(losses["1f1b"], rel=1e-9)
    assert abs(losses["2bw"] / losses["1f1b"] - 1) > 1e-6
    found = json.loads((tmp_path / "new" / "gpu.json").read_text())
    assert found["machine"]["device"] == "cpu"
    assert [section["name"] for section in found["sections"]] == ["gpu-alone", "gpu-waits", "gpu"]
    assert [row[0] for row in found["sections"][2]["rows"]] == list(names)
    assert [len(shared["steps"]) for shared in found["found"]["shared"]] == [2, 2, 2, 2]


def test_steps_follow_each_other_without_a_wait_in_between() -> None:
    cuda = Cuda()
    steps = Watched(lambda: cuda.log.append("step"), Device(CPU, cuda), num_steps=3)  # type: ignore[func-returns-value]
    steps()
    assert cuda.log == ["step", "step", "step", "wait"]
    assert len(steps.queued) == len(steps.done) == 1
    assert steps.queued[0] <= steps.done[0]


# What waits

no_cuda = pytest.mark.filterwarnings("ignore:CUDA is not available")


@no_cuda
def test_places_where_the_host_waits_are_counted(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_ranks, "token_loss", partial(waiting_loss, cuda))
    schedule = create("1f1b", num_ranks=1, num_microbatches=4)
    (waits,) = launch_on("threads", waits_of, 1, (WORK, schedule, 60.0))
    ((place, count),) = waits.places.items()
    assert count == 4  # once a microbatch
    for found in (place, waits.first):
        assert re.fullmatch(r"tests/bench/test_gpu\.py:\d+ operate", found)
    assert not waits.never


def test_a_place_in_torch_is_named_with_who_called_it() -> None:
    try:
        torch.nn.functional.cross_entropy(torch.ones(1), None)  # type: ignore[arg-type]
    except TypeError as error:
        place = place_in(traceback.extract_tb(error.__traceback__))
    assert re.fullmatch(
        r"tests/bench/test_gpu\.py:\d+ test_a_place_in_torch\w+ > torch/nn/functional\.py:\d+ cross_entropy", place
    )


@no_cuda
def test_a_host_that_never_waits_is_found_to_do_so(cuda: Cuda) -> None:
    schedule = create("1f1b", num_ranks=1, num_microbatches=4)
    (waits,) = launch_on("threads", waits_of, 1, (WORK, schedule, 60.0))
    assert (waits.places, waits.first) == ({}, None)


def test_another_error_of_the_step_is_no_wait() -> None:
    def step() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        Device(CPU, Cuda()).first_wait(step)


def event(name: str, start: float, end: float) -> Any:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))


def test_calls_that_wait_count_within_the_step_alone() -> None:
    events = [
        event("a step", 10, 20),
        event("cudaLaunchKernel", 11, 12),
        event("cudaStreamSynchronize", 12, 13),
        event("cudaStreamSynchronize", 14, 19),
        event("cudaMemcpyAsync", 13, 14),
        event("cudaEventSynchronize", 19, 25),
        event("cudaDeviceSynchronize", 21, 30),  # the profiler's own, at its end
    ]
    assert calls_within(events, "a step") == {"cudaStreamSynchronize": 2, "cudaEventSynchronize": 1}
    assert calls_within(events[:2], "a step") == {}
    assert calls_within(events[:1], "a step") is None


@pytest.mark.parametrize(
    ("waits", "num_ranks", "misses"),
    [
        (Waits({}, {}), 1, 0),
        (Waits({}, None), 1, 0),
        (Waits({"engine/stages/stage.py:1 backward": 2}, {}), 1, 1),
        (Waits({}, {"cudaStreamSynchronize": 1}), 1, 1),
        (Waits({}, {}, "engine/stages/stage.py:1 backward"), 1, 1),
        (Waits({"engine/transport/frame.py:1 fill": 2}, {"cudaStreamSynchronize": 2}), 2, 0),
    ],
)
def test_a_single_rank_that_waits_misses_its_bar(waits: Waits, num_ranks: int, misses: int) -> None:
    look = Look(create("1f1b", num_ranks=num_ranks, num_microbatches=4), [waits] * num_ranks)
    assert look_section([look]).misses == misses
    assert look.num_sends == (num_ranks - 1) * 8


# Memory


@pytest.mark.skipif(sys.platform != "linux", reason="glibc tells what it has handed out")
def test_what_a_microbatch_keeps_on_a_stage() -> None:
    """A layer keeps more of its forward than its input; under a split backward a part of that until W."""
    work = replace(WORK, config=replace(CONFIG, hidden_size=256, sequence_length=256), dtype=torch.float32)
    crossing = work.rows * 256 * 256 * 4
    device = Device(CPU, Cuda())
    full, split = (kept_by(work, work.stage(1, 4, CPU), 1, 4, device, splits) for splits in (False, True))
    assert full.activation > 8 * crossing
    assert abs(full.weight) < crossing / 8
    assert split.weight > 4 * crossing
    assert split.activation + split.weight == pytest.approx(full.activation, abs=2 * crossing)
    assert full.gradients == sum(weight.nbytes for weight in work.stage(1, 4, CPU).parameters())


def test_a_step_takes_its_stash_its_gradients_and_the_room_to_work_in() -> None:
    kept = {stage: Kept(activation=100, weight=7, workspace=10 * stage, gradients=1) for stage in range(4)}
    one = create("1f1b", num_ranks=4, num_microbatches=8).program()
    assert predicted_bytes(one, kept) == [4 * 100 + 1, 3 * 100 + 11, 2 * 100 + 21, 100 + 31]
    two = create("interleaved", num_ranks=2, num_microbatches=4).program()
    stash = simulate(two).peak_stash
    assert predicted_bytes(two, kept) == [100 * stash[0] + 2 + 20, 100 * stash[1] + 2 + 30]


def test_weight_gradients_that_are_put_off_count_too() -> None:
    kept = dict.fromkeys(range(2), Kept(activation=100, weight=10, workspace=0, gradients=0))
    last = predicted_bytes(create("zb-h1", num_ranks=2, num_microbatches=4).program(), kept)[1]
    assert last == 100 + 10 * 2


# Bars


def alone_of(**changes: Any) -> Alone:
    made = Alone("large", "1f1b", 20, [0.004], [0.002], [0.102], [0.1], 2**20, 2**20, 0.1, 2.0, 2.0)
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("alone", "misses"), [(alone_of(), 0), (alone_of(done=[0.104]), 1), (alone_of(done=[0.104], model="tiny"), 0)]
)
def test_a_large_model_on_one_rank_has_its_bar(alone: Alone, misses: int) -> None:
    assert alone_section([alone], WORKS).misses == misses


def test_the_engines_own_time_is_what_the_plain_loop_does_not_take() -> None:
    assert alone_of().own == pytest.approx(1e-4)


def outcome_of(name: str, loss: float) -> Outcome:
    schedule = create(name, num_ranks=2, num_microbatches=4)
    kept = dict.fromkeys(range(schedule.num_stages), Kept(2**20, 0, 0, 0))
    ranks = [
        Shared([Turn(1.0, 1.5, 0.1)], 2**30, 2**21, kept, None),
        Shared([Turn(1.1, 1.6, 0.1)], 0, 2**20, kept, loss),
    ]
    return Outcome(schedule, 3, ranks)


@pytest.mark.parametrize(("name", "loss", "misses"), [("gpipe", 2.01, 0), ("gpipe", 2.1, 1), ("2bw", 2.1, 0)])
def test_schedules_with_a_flush_have_one_loss(name: str, loss: float, misses: int) -> None:
    found = Found(alone=[alone_of()], shared=[outcome_of("1f1b", 2.0), outcome_of(name, loss)])
    section = shared_section(found, WORK, "GPU")
    assert section.misses == misses
    assert section.rows[0] == (
        *("1f1b", "2", "200.0 [200.0 .. 200.0]", "1.96", "160"),
        *("2 1", "2 1", "2 1", "1024 0", "2.0000"),
    )
    assert section.bars["1f1b"] == {"step": pytest.approx(200.0)}


# Time


def test_a_part_is_begun_only_if_there_is_time_for_the_longest_of_its_kind_and_its_start() -> None:
    now = [100.0]
    budget = Budget(70, lambda: now[0])
    assert budget.allows("shared")
    budget.spent("shared", 20)
    budget.spent("shared", 10)
    now[0] += 41
    assert budget.left == 29
    assert not budget.allows("shared")
    assert not budget.allows("alone")
    budget.spent("alone", 15)
    assert budget.allows("alone")


@pytest.mark.parametrize(("seconds", "limit"), [(480, 120), (100, 90)])
def test_a_part_that_hangs_leaves_time_for_others(seconds: float, limit: float) -> None:
    assert Budget(seconds, lambda: 0.0).limit == limit


def test_what_fails_and_what_has_no_time_takes_nothing_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = [0.0]
    good = Part("shared", "large", create("1f1b", num_ranks=2, num_microbatches=4))
    bad = Part("alone", "tiny", create("1f1b", num_ranks=1, num_microbatches=4))

    def launch(function: Callable[..., Any], num_ranks: int, *, args: Any) -> Any:
        now[0] += 50
        if function is beside_plain:
            raise RuntimeError("no memory\nfor this")
        assert function is shared
        assert args[-1] == min(120, 170 - (now[0] - 50) - 10)
        return outcome_of("1f1b", 2.0).of_ranks

    monkeypatch.setattr(gpu, "launch_local", launch)
    monkeypatch.setattr(gpu, "perf_counter", lambda: now[0])
    bench = Bench(WORKS, Budget(170, lambda: now[0]), tmp_path / "gpu.json", Console(quiet=True))
    bench.measure([bad, good, good, good])
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["found"]["failures"] == {str(bad): "RuntimeError: no memory"}
    assert found["found"]["left"] == [str(good)]
    assert [row[0] for row in found["sections"][2]["rows"]] == ["1f1b", "1f1b"]
    assert "no memory" in found["sections"][2]["note"]
    assert f"no time was left for {good}" in found["sections"][2]["note"]


def test_a_rank_that_takes_too_long_is_ended_and_another_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(gpu_ranks, "_exit", ends.append)
    with ended_after(60):
        pass
    with ended_after(0.0):
        while not ends:
            time.sleep(0.001)
    assert ends == [1]


# Machine


def test_the_machine_names_its_gpu_and_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 570.1\necho 570.1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = machine_of(Device(torch.device("cuda", 0), Cuda()), Cuda())
    assert (found["device"], found["GiB"], found["driver"]) == ("A GPU", 80, "570.1")
    assert found["torch"] == str(torch.__version__)


def test_without_the_tool_the_driver_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert machine_of(Device(torch.device("cuda", 0), Cuda()), Cuda())["driver"] == "unknown"


@pytest.mark.slow
def test_the_whole_bench_runs_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    main(["--device", "cpu", "--ranks", "2", "--microbatches", "4", "--only", "1f1b", "--out", str(path)])
    found = json.loads(path.read_text())["found"]
    assert not found["failures"]
    assert [len(found[kind]) for kind in ("alone", "waits", "shared")] == [4, 2, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch finds none")
def test_on_one_gpu_the_host_never_waits_within_a_step() -> None:
    work = works_on("cuda", 4)["tiny"]
    (waits,) = launch_local(waits_of, 1, args=(work, create("1f1b", num_ranks=1, num_microbatches=4), 300.0))
    assert waits.never, waits
