"""What trainers mean, between processes: the same numbers over gloo as in one process."""

import pytest
import torch
from launching import launch_on
from meanings import Trained, assert_close, assert_same, make_batches, make_float_stage, train_all, train_plainly
from normed import Build as BuildNormed
from tied import TIED, Build, make_text, mean_over_tokens, sum_and_count

from stagewright.schedules import create

TEXT = [make_text(9, step) for step in range(4)]
NAMES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev", "dualpipe", "chimera"]
SCHEDULES = [create(name, num_ranks=2, num_microbatches=4) for name in NAMES]
MEANING = {
    "loss_fn": sum_and_count,
    "tied": TIED,
    "max_norm": 0.4,
    "share_loss": True,
    "loss_scale": "dynamic",
}


def test_tied_weights_norms_counts_and_scales_over_gloo() -> None:
    """All that ranks agree on, under every schedule in one launch."""
    cases = [(schedule, TEXT, {"build_stage": Build(schedule.num_stages), **MEANING}) for schedule in SCHEDULES]
    for schedule, results in zip(SCHEDULES, zip(*launch_on("gloo", train_all, 2, (cases,)))):
        tied = Build(schedule.num_stages, tie=True)
        plain = train_plainly(schedule.num_stages, TEXT, mean_over_tokens, build_stage=tied, max_norm=0.4)
        assert_same(results, plain)
        for result in results:
            assert result.norms == pytest.approx(plain.norms, rel=1e-12, abs=0)
            assert [loss.item() for loss in result.losses] == [loss.item() for loss in results[0].losses]


def test_an_overflow_over_gloo_moves_nothing() -> None:
    """In float32 so large a scale is too much for every gradient."""
    batches = [(x.float(), y.float()) for x, y in make_batches(4)]
    options = {"build_stage": make_float_stage, "loss_scale": 1e300}
    cases = [(schedule, batches, options) for schedule in SCHEDULES]
    for schedule, results in zip(SCHEDULES, zip(*launch_on("gloo", train_all, 2, (cases,)))):
        start = train_plainly(schedule.num_stages, batches[-1:], build_stage=make_float_stage)
        assert_close([result.weights for result in results], start.weights, 0.0)
        assert not any(result.gradients for result in results)


def test_deferred_batch_norms_over_gloo() -> None:
    """The copies of a stage learn from each other what they have seen: processes remember what threads do."""
    batches = make_batches(3)
    options = {"build_stage": BuildNormed(0.1), "deferred_batch_norm": True, "share_loss": True}
    cases = [(schedule, batches, options) for schedule in SCHEDULES[-3:]]
    between: list[list[Trained]] = launch_on("gloo", train_all, 2, (cases,))
    within: list[list[Trained]] = launch_on("threads", train_all, 2, (cases,))
    for one, other in zip(between, within, strict=True):
        for result, expected in zip(one, other, strict=True):
            assert result.buffers.keys() == expected.buffers.keys()
            assert result.buffers
            for key, buffer in expected.buffers.items():
                assert torch.equal(result.buffers[key], buffer)
            assert [loss.item() for loss in result.losses] == [loss.item() for loss in expected.losses]
