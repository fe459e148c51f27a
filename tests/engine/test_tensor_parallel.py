"""Stages cut over a tensor-parallel dimension of the mesh: a stage is any module, also one of DTensors."""

from typing import Any

import pytest
from launching import launch_on
from spread import run_all, train_spread
from test_fsdp import assert_same

from stagewright.engine import launch_local
from stagewright.schedules import create

SIZES = {"pp": 2, "tp": 2}
CASES: list[tuple[str, float | None]] = [("1f1b", 0.1), ("zbv", None), ("dualpipe", 0.1)]


def options_of(name: str, max_norm: float | None) -> dict[str, Any]:
    return {"schedule": create(name, num_ranks=2, num_microbatches=4), "max_norm": max_norm}


def test_tensor_parallel_stages_train_as_a_plain_loop_does() -> None:
    """Under whole and under split backward, with one copy of each stage and with two; in the norm each element counts
    once, wherever it is."""
    tasks = [(train_spread, (SIZES, "parallel", (9,), options_of(*case))) for case in CASES]
    of_ranks = launch_on("gloo", run_all, 4, (tasks,))
    for index, (name, max_norm) in enumerate(CASES):
        results = [results[index] for results in of_ranks]
        assert all("DTensor" in seen and "Parameter" in seen for _, _, seen in results)
        assert_same(results, create(name, num_ranks=2, num_microbatches=4).num_stages, "parallel", 9, max_norm)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parallel", "both"])
def test_three_dimensions_at_once(kind: str) -> None:
    """pp x dp x tp on eight small processes; replicas whole, or sharded too."""
    sizes, parts = {"pp": 2, "dp": 2, "tp": 2}, (5, 4)
    results = launch_local(train_spread, 8, args=(sizes, kind, parts, options_of("1f1b", 0.1)))
    assert_same(results, 2, kind, 9, 0.1)
