"""2BW over several stages a rank trains as 2BW does with a rank a stage, which is what a plain loop does."""

from typing import Any

import pytest
import torch
from launching import launch_on
from plain import TOLERANCE, make_batch, momentum
from shapes import label
from stale_loop import Rule, Weights, train_rank, train_stale
from tied import TIED, Build, make_text, sum_and_count

from stagewright.engine import ErrorFeedback, WeightPrediction
from stagewright.schedules import Schedule, create

NUM_BATCHES = 7
SHAPES = [(1, 2, 1), (1, 3, 2), (2, 2, 1), (2, 2, 3), (2, 3, 2), (3, 2, 2), (3, 2, 7), (4, 2, 4)]


def batches_of(schedule: Schedule) -> list[Any]:
    return [make_batch(2 * schedule.num_microbatches + 1, step) for step in range(NUM_BATCHES)]


def run(kind: Any, schedule: Schedule, flushed: tuple[int, ...] = (), **options: Any) -> tuple[list[float], Weights]:
    options = {"batches": batches_of(schedule), **options}
    results = launch_on(kind, train_rank, schedule.num_ranks, (schedule, flushed, options))
    assert len({norm for _, _, norm in results}) == 1
    return results[0][0], {key: weight for _, weights, _ in results for key, weight in weights.items()}


def assert_same(found: tuple[list[float], Weights], wanted: tuple[list[float], Weights]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=TOLERANCE, abs=TOLERANCE)
    assert set(found[1]) == set(wanted[1])
    for key, weight in found[1].items():
        torch.testing.assert_close(weight, wanted[1][key], rtol=TOLERANCE, atol=TOLERANCE)


def interleaved(num_ranks: int, num_chunks: int, num_microbatches: int) -> Schedule:
    return create("2bw-interleaved", num_ranks=num_ranks, num_chunks=num_chunks, num_microbatches=num_microbatches)


def one_update_late(stage: int, update: int) -> int:
    return max(update - 1, 0)


@pytest.mark.parametrize("schedule", [interleaved(*shape) for shape in SHAPES], ids=label)
@pytest.mark.parametrize("flushed", [(), (0, 3)], ids=["on and on", "drained"])
def test_it_trains_as_a_plain_loop_does(schedule: Schedule, flushed: tuple[int, ...]) -> None:
    wanted = train_stale(schedule.num_stages, batches_of(schedule), momentum, Rule(one_update_late))
    assert_same(run("threads", schedule, flushed), wanted)


def test_it_trains_so_in_processes() -> None:
    schedule = interleaved(2, 2, 3)
    wanted = train_stale(4, batches_of(schedule), momentum, Rule(one_update_late))
    assert_same(run("gloo", schedule, (2,)), wanted)


@pytest.mark.parametrize("staleness", [WeightPrediction(), ErrorFeedback()], ids=["prediction", "feedback"])
def test_remedies_serve_all_stages_of_a_rank(staleness: Any) -> None:
    schedule = interleaved(2, 2, 2)
    rule = Rule(one_update_late, prediction=dict.fromkeys(range(4), 1.0))
    if isinstance(staleness, ErrorFeedback):
        rule = Rule(one_update_late, feedback=1.0)
    wanted = train_stale(4, batches_of(schedule), momentum, rule)
    assert_same(run("threads", schedule, staleness=staleness), wanted)


@pytest.mark.parametrize("tied", [TIED, ()], ids=["tied", "apart"])
@pytest.mark.parametrize("max_norm", [0.5, None])
def test_what_an_update_needs_of_other_ranks_is_that_of_2bw(tied: Any, max_norm: float | None) -> None:
    """Norms, counts of tokens and tied weights: the stages of a rank wait for them together."""
    options = {
        "build_stage": Build(4),
        "loss_fn": sum_and_count,
        "loss_counts": True,
        "tied": tied,
        "max_norm": max_norm,
        "batches": [make_text(9, step) for step in range(NUM_BATCHES)],
        "recompute": "full",
    }
    plain = run("threads", create("2bw", num_ranks=4, num_microbatches=4), (3,), **options)
    assert_same(run("threads", interleaved(2, 2, 4), (3,), **options), plain)
