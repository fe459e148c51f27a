"""Stages that FSDP2 shards over the replicas: gathered, reduced and freed when the program says so."""

from typing import Any

import pytest
import torch
from launching import launch_on
from plain import TOLERANCE
from spread import refuse, run_all, train_plainly, train_spread

from stagewright.schedules import create

SIZES = {"pp": 2, "dp": 2}
CASES: list[tuple[str, str, tuple[int, int], float | None]] = [
    ("1f1b", "sharded", (9, 9), None),
    ("gpipe", "mixed", (9, 9), 0.1),
    ("interleaved", "sharded", (5, 13), 0.1),
    ("zbv", "sharded", (5, 13), 0.1),
]


def options_of(name: str, max_norm: float | None) -> dict[str, Any]:
    shape = {"num_chunks": 2} if name == "interleaved" else {}
    return {"schedule": create(name, num_ranks=2, num_microbatches=4, **shape), "max_norm": max_norm}


def assert_same(of_ranks: list[Any], num_stages: int, kind: str, rows: int, max_norm: float | None) -> None:
    """Losses, norms, weights and gradients are those of the plain loop."""
    plain, norms = train_plainly(num_stages, kind, rows, max_norm)
    for result, own_norms, _ in of_ranks:
        assert result.losses == pytest.approx(plain.losses, rel=TOLERANCE)
        for own, expected in zip(own_norms, norms, strict=True):
            assert own is None if expected is None else own == pytest.approx(expected, rel=1e-11)
        for ours, theirs in ((result.weights, plain.weights), (result.gradients, plain.gradients)):
            for key, tensor in ours.items():
                torch.testing.assert_close(tensor, theirs[key], rtol=1e-11, atol=TOLERANCE, msg=str(key))
    assert {key for result, _, _ in of_ranks for key in result.weights} == set(plain.weights)


def test_sharded_stages_train_as_a_plain_loop_does() -> None:
    """All in one launch: a sharded stage beside a whole one, several on a rank, whole and split backward."""
    tasks = [(train_spread, (SIZES, kind, parts, options_of(name, norm))) for name, kind, parts, norm in CASES]
    of_ranks = launch_on("gloo", run_all, 4, (tasks,))
    for index, (name, kind, parts, max_norm) in enumerate(CASES):
        results = [results[index] for results in of_ranks]
        num_stages = options_of(name, None)["schedule"].num_stages
        assert_same(results, num_stages, kind, sum(parts), max_norm)
        for rank, (_, _, seen) in enumerate(results):
            is_sharded = kind == "sharded" or rank < 2
            assert ("DTensor" in seen) == is_sharded
            assert seen.count(f"{rank // 2}UNSHARD") == seen.count(f"{rank // 2}RESHARD") == int(is_sharded)
            assert seen.count(f"{rank // 2}REDUCE_GRAD") == 1


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("sharded", {"schedule": "2bw", "num_microbatches": 2}, "take a synchronous schedule"),
    ("sharded", {"schedule": "chimera", "num_microbatches": 4}, "one copy of each stage"),
    ("sharded", {"num_microbatches": 2, "master_weights": True}, "MixedPrecisionPolicy"),
    ("sharded", {"num_microbatches": 2, "tied": [["norm.weight"]]}, "leave that stage whole"),
]


def test_what_does_not_go_with_shards_is_refused_with_the_remedy() -> None:
    launch_on("gloo", run_all, 4, ([(refuse, case) for case in REFUSED],))
