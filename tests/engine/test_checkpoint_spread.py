"""Checkpoints of stages that FSDP2 or tensor parallelism spreads over ranks: whole on the disk, for any shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launching import launch_on
from saved_shards import Trained, move_weights, train_saved
from spread import run_all

from stagewright.engine import launch_local, read_state_dict

REPLICAS, PARALLEL = {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}


def assert_same(one: Trained, other: Trained, tolerance: float = 0.0) -> None:
    assert one[0] == pytest.approx(other[0], rel=tolerance, abs=tolerance)
    assert one[1].keys() == other[1].keys()
    for name, weight in one[1].items():
        torch.testing.assert_close(weight, other[1][name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(("sizes", "kind"), [(REPLICAS, "sharded"), (REPLICAS, "mixed"), (PARALLEL, "parallel")])
def test_a_training_goes_on_with_its_shards(sizes: dict[str, int], kind: str, tmp_path: Path) -> None:
    """To the last bit, Adam's state included; what is on the disk is whole, and goes into shards and out of them."""
    on = tmp_path / "on"
    tasks: list[tuple[Any, tuple[Any, ...]]] = [
        (train_saved, (sizes, kind, tmp_path / "alone", 5, False)),
        (train_saved, (sizes, kind, on, 2, True)),
        (train_saved, (sizes, kind, on, 4, True)),
        (train_saved, (sizes, kind, on, 5, False)),
        (move_weights, (sizes, kind, on)),
    ]
    for unbroken, first, second, third, _ in launch_on("gloo", run_all, 4, (tasks,)):
        assert_same((first[0] + second[0] + third[0], third[1]), unbroken)
    names = {path.name for path in (on / "step-4.save-2").iterdir()}
    num_writers = sizes["pp"] * sizes.get("dp", 1)
    assert names == {"index.json", *(f"rank-{rank}.safetensors" for rank in range(num_writers))}
    assert read_state_dict(on)["stage0.widen.weight"].shape[0] > read_state_dict(on)["stage0.narrow.weight"].shape[0]


def test_a_training_goes_on_with_shards_or_without(tmp_path: Path) -> None:
    """Up to rounding, from replicas to shards to replicas."""
    tasks: list[tuple[Any, tuple[Any, ...]]] = [
        (train_saved, (REPLICAS, "whole", tmp_path / "alone", 6, False)),
        (train_saved, (REPLICAS, "whole", tmp_path / "on", 2, True)),
        (train_saved, (REPLICAS, "sharded", tmp_path / "on", 4, True)),
        (train_saved, (REPLICAS, "whole", tmp_path / "on", 6, False)),
    ]
    for unbroken, *parts in launch_on("gloo", run_all, 4, (tasks,)):
        losses = [loss for of_part, _ in parts for loss in of_part]
        assert_same((losses, parts[-1][1]), unbroken, 1e-11)


@pytest.mark.slow
def test_three_dimensions_at_once(tmp_path: Path) -> None:
    """pp x dp x tp on eight small processes, sharded over both, saved and gone on with, so and with tp alone."""
    sizes = {"pp": 2, "dp": 2, "tp": 2}
    tasks: list[tuple[Any, tuple[Any, ...]]] = [
        (train_saved, (sizes, "both", tmp_path / "alone", 4, False)),
        (train_saved, (sizes, "both", tmp_path / "on", 2, True)),
        (train_saved, (sizes, "parallel", tmp_path / "on", 4, False)),
        (train_saved, (sizes, "both", tmp_path / "on", 4, False)),
    ]
    for unbroken, first, other, second in launch_local(run_all, 8, args=(tasks,)):
        assert_same((first[0] + second[0], second[1]), unbroken)
        assert_same((first[0] + other[0], other[1]), unbroken, 1e-11)
