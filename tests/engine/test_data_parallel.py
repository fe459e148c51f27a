"""Data parallelism beside the pipeline: replicas on their own rows train as a plain loop does on all of them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import pytest
import torch
from data_parallel import assert_replicas_equal, train_asynchronously, train_many, train_replica
from delayed import Case, train_delayed
from delayed import assert_same as assert_same_delayed
from launching import launch_on
from plain import assert_same, train_plainly

from stagewright.schedules import Schedule, create

SCHEDULES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "gpipe": {},
        "1f1b": {},
        "interleaved": {"num_chunks": 2},
        "zb-h1": {},
        "zbv": {},
        "dualpipe": {},
        "dualpipev": {},
        "chimera": {},
    }
)


def of_two_ranks(name: str) -> Schedule:
    """A schedule at the shape of these tests."""
    return create(name, num_ranks=2, num_microbatches=4, **SCHEDULES[name])


@pytest.mark.parametrize("name", SCHEDULES)
def test_replicas_have_the_losses_gradients_and_weights_of_a_plain_loop(name: str) -> None:
    schedule = of_two_ranks(name)
    results = launch_on("threads", train_replica, 4, ([9, 9], 2, {"schedule": schedule}))
    assert_same(results, train_plainly(schedule.num_stages, 18, 2))
    assert_replicas_equal(results, 2)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
def test_replicas_with_unequal_batches_count_by_their_rows(name: str) -> None:
    schedule = of_two_ranks(name)
    results = launch_on("threads", train_replica, 6, ([5, 13, 4], 2, {"schedule": schedule}))
    assert_same(results, train_plainly(schedule.num_stages, 22, 2))
    assert_replicas_equal(results, 3)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_pipeline_of_one_rank_and_of_many_has_replicas(num_ranks: int) -> None:
    options = {"schedule": "1f1b", "num_microbatches": 3}
    results = launch_on("threads", train_replica, 2 * num_ranks, ([4, 7], 2, options))
    assert_same(results, train_plainly(num_ranks, 11, 2))
    assert_replicas_equal(results, 2)


def test_replicas_of_processes_train_alike() -> None:
    """Over gloo's own sums; one launch for all."""
    cases = [([9, 9], 2, {"schedule": of_two_ranks(name)}) for name in ("1f1b", "zbv", "dualpipe")]
    cases.append(([5, 13], 2, {"schedule": of_two_ranks("1f1b"), "max_norm": 1e9}))
    of_ranks = launch_on("gloo", train_many, 4, (cases,))
    for index, (parts, steps, options) in enumerate(cases):
        results = [results[index] for results in of_ranks]
        assert_same(results, train_plainly(options["schedule"].num_stages, sum(parts), steps))
        assert_replicas_equal(results, 2)


ASYNCHRONOUS: Final = (
    Case(2, 4, num_batches=5, rows=18),
    Case(3, 3, num_batches=5, optimizer="adam", decays=True, actions={2: "flush"}, rows=14),
    Case(2, 2, num_batches=5, max_norm=0.1, actions={3: "evaluate"}, rows=9),
    Case(2, 4, num_batches=5, optimizer="sgd", model="tied", rows=12),
    Case(3, 2, "pipedream", num_batches=5, rows=8),
    Case(3, 2, "pipedream", {"vertical_sync": True}, num_batches=5, rows=8),
)


@pytest.mark.parametrize("case", ASYNCHRONOUS, ids=lambda case: f"{case.schedule}-{case.model}-P{case.num_ranks}")
def test_replicas_under_an_asynchronous_schedule_keep_the_delayed_rule(case: Case) -> None:
    """Each replica has the rows of every microbatch that it would have of the whole batch's."""
    results = launch_on("threads", train_asynchronously, 2 * case.num_ranks, (case, 2))
    assert_same_delayed(results, train_delayed(case))
    for first, other in zip(results[::2], results[1::2], strict=True):
        assert first.losses == other.losses
        assert all(torch.equal(first.weights[key], other.weights[key]) for key in first.weights)


def test_replicas_of_processes_keep_the_delayed_rule() -> None:
    case = ASYNCHRONOUS[0]
    assert_same_delayed(launch_on("gloo", train_asynchronously, 4, (case, 2)), train_delayed(case))
