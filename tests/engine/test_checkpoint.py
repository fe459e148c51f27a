"""Checkpoints: a training goes on where it was, on the same ranks to the last bit, and on others on the same curve."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import Shape, make_pipeline, make_tokens, train_on
from launching import launch_on

from stagewright.engine import Checkpoints, RankContext

EVERYTHING: dict[str, Any] = {
    "model": {"dropout": 0.2},
    "pipeline": {"max_norm": 0.5, "loss_scale": "dynamic"},
}
SAME = [
    Shape("1f1b", 2, **EVERYTHING),
    Shape("zbv", 2, **EVERYTHING),
    Shape("dualpipe", 2, **EVERYTHING),
    Shape("interleaved", 2, options={"num_chunks": 2}, **EVERYTHING),
    Shape("2bw", 3, **EVERYTHING),
    Shape("pipedream", 3, model={"dropout": 0.2}),
    Shape("2bw", 2, dtype=torch.bfloat16, pipeline={"master_weights": True}, model={"tied": True}),
    Shape("1f1b", 2, num_replicas=2, **EVERYTHING),
]


def label(shape: Shape) -> str:
    replicas = f"x{shape.num_replicas}" if shape.num_replicas > 1 else ""
    return f"{shape.schedule}-{shape.num_ranks}{replicas}-{str(shape.dtype).removeprefix('torch.')}"


def assert_same(one: Any, other: Any, tolerance: float = 0.0) -> None:
    """The same losses and weights, and all of the model."""
    assert one[0] == pytest.approx(other[0], rel=tolerance, abs=tolerance)
    assert one[1].keys() == other[1].keys()
    for name, weight in one[1].items():
        torch.testing.assert_close(weight, other[1][name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("shape", SAME, ids=label)
def test_the_same_shape_goes_on_to_the_last_bit(shape: Shape, tmp_path: Path) -> None:
    """Dropout, Adam, a scheduler, clipping and the loss scale, and for 2BW and PipeDream the versions still to be read;
    one training is never interrupted, the other begins anew after each checkpoint."""
    unbroken = train_on("threads", shape, tmp_path / "unbroken", 6, (2, 5))
    losses = []
    for stop in (2, 5, 6):
        part, weights = train_on("threads", shape, tmp_path / "broken", stop, (2, 5))
        losses += part
    assert (len(unbroken[0]), len(part)) == (6, 1)
    assert_same((losses, weights), unbroken)


def go_on(shapes: Sequence[Shape], folder: Path) -> Any:
    """Two steps with each shape, from one to the next."""
    losses = []
    for number, shape in enumerate(shapes, 1):
        part, weights = train_on("threads", shape, folder, 2 * number, (2 * number,))
        assert len(part) == 2
        losses += part
    return losses, weights


OTHERS = [
    [
        Shape("1f1b", 4, **EVERYTHING),
        Shape("interleaved", 2, options={"num_chunks": 2}, **EVERYTHING),
        Shape("gpipe", 1, **EVERYTHING),
        Shape("1f1b", 2, num_replicas=2, **EVERYTHING),
        Shape("zbv", 2, **EVERYTHING),
        Shape("dualpipe", 2, **EVERYTHING),
    ],
    [
        Shape("gpipe", 1, model={"tied": True}),
        Shape("interleaved", 1, options={"num_chunks": 2}, model={"tied": True}),
        Shape("1f1b", 2, model={"tied": True}),
        Shape("1f1b", 4, model={"tied": True}),
        Shape("gpipe", 1, model={"tied": True}),
    ],
]


@pytest.mark.parametrize("shapes", OTHERS, ids=["everything", "tied"])
def test_other_ranks_stages_replicas_and_schedules_go_on_with_the_same_curve(
    shapes: list[Shape], tmp_path: Path
) -> None:
    """P=4 -> 2x2 chunks -> 1 -> 2x2 replicas -> zbv -> …, Adam's state included, in float64."""
    alone = train_on("threads", shapes[0], tmp_path / "alone", 2 * len(shapes))
    assert_same(go_on(shapes, tmp_path / "on"), alone, 1e-11)


def test_2bw_goes_on_in_another_shape_with_both_of_its_versions(tmp_path: Path) -> None:
    """P=2 -> 4 -> 2x2 replicas -> 1, in float64: the delayed rule knows of no rank, stage, replica or microbatch."""
    shapes = [Shape("2bw", 2), Shape("2bw", 4), Shape("2bw", 2, num_replicas=2), Shape("2bw", 1)]
    alone = train_on("threads", shapes[0], tmp_path / "alone", 2 * len(shapes))
    assert_same(go_on(shapes, tmp_path / "on"), alone, 1e-11)


def test_an_asynchronous_training_goes_on_under_another_schedule_with_its_newest_weights(tmp_path: Path) -> None:
    """The optimizer's state goes with them; the older version, which the delayed rule would read next, does not."""
    shape, other = Shape("2bw", 2), Shape("1f1b", 2)
    _, newest = train_on("threads", shape, tmp_path, 3, (3,))
    _, loaded = train_on("threads", other, tmp_path, 3)
    assert_same(([], loaded), ([], newest))
    on, _ = train_on("threads", other, tmp_path, 6)
    alone, _ = train_on("threads", Shape("gpipe", 1), tmp_path, 6)
    delayed, _ = train_on("threads", shape, tmp_path, 6)
    assert on == pytest.approx(alone, rel=1e-11)
    assert on[0] != pytest.approx(delayed[0], rel=1e-6)


def scale(context: RankContext, shape: Shape, folder: Path) -> tuple[float, int]:
    """The loss scale and its counter after a step; it begins with another scale than it would by itself."""
    with make_pipeline(context, shape) as pipe:
        checkpoints = Checkpoints(folder, pipe)
        begins = checkpoints.load() is None
        loss_scale = pipe._updater.loss_scale
        assert loss_scale is not None
        if begins:
            loss_scale.value = 2.0**100
        pipe.train_step(*make_tokens(pipe.num_steps))
        checkpoints.save()
        return loss_scale.value, loss_scale.num_good_steps


def test_the_loss_scale_and_its_counter_go_on(tmp_path: Path) -> None:
    for number, num_ranks in enumerate((2, 2, 1, 4), 1):
        shape = Shape("1f1b", num_ranks, pipeline={"loss_scale": "dynamic"})
        assert launch_on("threads", scale, num_ranks, (shape, tmp_path)) == [(2.0**100, number)] * num_ranks


def test_processes_save_and_go_on_too(tmp_path: Path) -> None:
    """Each writes its own shard, also while it trains; threads read them."""
    shape = Shape("1f1b", 2, **EVERYTHING)
    alone = train_on("threads", shape, tmp_path / "alone", 4)
    first, _ = train_on("gloo", shape, tmp_path / "on", 2, (2,), {"asynchronous": True})
    second, _ = train_on("gloo", shape, tmp_path / "on", 3, (3,))
    third, weights = train_on("threads", shape, tmp_path / "on", 4)
    assert_same((first + second + third, weights), alone)
    names = {path.name for path in (tmp_path / "on" / "step-3.save-2").iterdir()}
    assert names == {"index.json", "rank-0.safetensors", "rank-1.safetensors"}
