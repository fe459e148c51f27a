"""Stages with several replicas train as one process does: sums over microbatches that went round, equal to the bit."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import delayed
import plain
import pytest
import torch
from delayed import Case, label, train_delayed, train_rank
from launching import Kind, launch_on
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext
from stagewright.schedules import create

STEPS = 3


def assert_replicas_are_equal(results: Sequence[Any], replicas: Sequence[int]) -> None:
    """To the last bit; ``results`` are those of ranks, whose weights are by (stage, name)."""
    rank = 0
    for stage, count in enumerate(replicas):
        first, *others = [result.weights for result in results[rank : rank + count]]
        assert {of_stage for of_stage, _ in first} == {stage}
        for other in others:
            assert first.keys() == other.keys()
            assert all(torch.equal(weight, other[key]) for key, weight in first.items())
        rank += count


# 1F1B against the plain loop on whole batches


@cache
def trained_plainly(num_stages: int, rows: int) -> plain.Result:
    return plain.train_plainly(num_stages, rows, STEPS)


def assert_trains_as_plainly(replicas: tuple[int, ...], num_microbatches: int, kind: Kind = "threads") -> None:
    """With a batch whose rows do not divide by the microbatches."""
    num_ranks, rows = sum(replicas), 2 * num_microbatches + 1
    schedule = create("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches, replicas=replicas)
    results = launch_on(kind, plain.train_pipelined, num_ranks, (rows, STEPS, {"schedule": schedule}))
    plain.assert_same(results, trained_plainly(len(replicas), rows))
    assert_replicas_are_equal(results, replicas)


REPLICAS = [(2, 1), (1, 2), (2, 2), (1, 2, 1), (3, 2)]
SHAPES = [(replicas, num_microbatches) for replicas in REPLICAS for num_microbatches in range(1, 10)]


@pytest.mark.parametrize(("replicas", "num_microbatches"), SHAPES[::3])
def test_equals_the_plain_loop(replicas: tuple[int, ...], num_microbatches: int) -> None:
    """Also with fewer microbatches than replicas, some of which then only take part in the sums."""
    assert_trains_as_plainly(replicas, num_microbatches)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "num_microbatches"), [*SHAPES, ((4,), 3), ((3,), 7), ((1, 3), 5), ((2, 3, 2), 9)])
def test_equals_the_plain_loop_at_every_shape(replicas: tuple[int, ...], num_microbatches: int) -> None:
    assert_trains_as_plainly(replicas, num_microbatches)


def test_equals_the_plain_loop_in_processes() -> None:
    assert_trains_as_plainly((2, 1), 5, "gloo")
    assert_trains_as_plainly((1, 2, 1), 1, "gloo")


# What they start from


class Drawn(nn.Module):
    """Weights that nobody has seeded, on any stage, and a buffer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.tensor(rank))
        with torch.no_grad():
            self.linear.weight.fill_(rank)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def built(context: RankContext, name: str, options: dict[str, Any]) -> dict[int, dict[str, Tensor]]:
    """What the copies on a rank hold at first."""
    with Pipeline(
        lambda stage: Drawn(context.rank),
        schedule=name,
        num_microbatches=4,
        master_weights=True,
        transport=context.transport,
        **options,
    ) as pipe:
        return {stage: module.state_dict() for stage, module in pipe.modules.items()}


@pytest.mark.parametrize(
    ("name", "num_ranks", "options"),
    [("1f1b", 3, {"replicas": (2, 1)}), ("2bw", 4, {"replicas": (1, 3)}), ("dualpipe", 2, {}), ("chimera", 4, {})],
)
@pytest.mark.parametrize("kind", ["threads", "double"])
def test_copies_start_from_the_first_one(name: str, num_ranks: int, options: dict[str, Any], kind: Kind) -> None:
    """However their ranks have built them; else they would be different models that add up their gradients."""
    of_ranks = launch_on(kind, built, num_ranks, (name, options))
    placement = create(name, num_ranks=num_ranks, num_microbatches=4, **options).placement
    for stage in range(placement.num_stages):
        first, *others = placement.replicas_of(stage)
        assert of_ranks[first][stage]["count"] == first
        assert torch.equal(of_ranks[first][stage]["linear.weight"], torch.full((3, 3), float(first)))
        for other in others:
            for key, value in of_ranks[first][stage].items():
                assert torch.equal(of_ranks[other][stage][key], value)


# All that a training may have, against the loop that applies each schedule's own rule of versions


def shape(
    replicas: tuple[int, ...], num_microbatches: int, schedule: str = "2bw", /, sync: bool = False, **more: Any
) -> Case:
    options = {"replicas": replicas, **({"vertical_sync": True} if sync else {})}
    return Case(sum(replicas), num_microbatches, schedule, options, 6, **more)


def cases() -> Iterator[Case]:
    clipped = {"optimizer": "adamw", "max_norm": 0.3, "actions": {1: "predict", 3: "flush", 4: "evaluate"}}
    dropping = {"model": "dropout", "recompute": "full", "optimizer": "adam", "actions": {2: "save"}}
    tied = {"model": "tied", "optimizer": "adamw", "max_norm": 0.3, "actions": {2: "flush"}}
    yield shape((2, 1), 3, "1f1b", **clipped)
    yield shape((1, 2), 5, "1f1b", **dropping)
    yield shape((1, 2, 1), 4, "1f1b", **tied)
    yield shape((2, 2), 1, "1f1b", **tied)
    yield shape((2, 1), 2, **clipped)  # as few as there can be
    yield shape((2, 1), 5, **tied)
    yield shape((1, 2), 3, decays=True, actions={0: "flush", 3: "evaluate"})
    yield shape((2, 2), 5, **dropping)
    yield shape((1, 2, 1), 7, **clipped)
    yield shape((3, 2), 7, **tied)


def of_pipedream() -> Iterator[Case]:
    """Updates after each round, and the delays that stages have."""
    evaluated = {"decays": True, "actions": {0: "flush", 2: "evaluate", 4: "predict"}}
    dropping = {"model": "dropout", "recompute": "full", "optimizer": "adam", "actions": {2: "save"}}
    yield shape((2, 1), 4, "pipedream", per_update=2, delays=(2, 0), **evaluated)
    yield shape((2, 1), 2, "pipedream", sync=True, per_update=2, delays=(2, 2), **dropping)
    yield shape((1, 2), 4, "pipedream", per_update=2, delays=(1, 1), **dropping)
    yield shape((2, 2), 2, "pipedream", per_update=2, delays=(1, 0), **evaluated)
    yield shape((1, 2, 1), 4, "pipedream", per_update=2, delays=(2, 2, 0), **dropping)
    yield shape((1, 2, 1), 2, "pipedream", sync=True, per_update=2, delays=(2, 2, 2), **evaluated)
    yield shape((3, 2), 6, "pipedream", per_update=6, delays=(1, 1), **evaluated)


def name(case: Case) -> str:
    return f"{case.schedule}-{'-'.join(map(str, case.options['replicas']))}-{label(case)}"


@pytest.mark.parametrize("case", [*cases(), *of_pipedream()], ids=name)
def test_equals_the_delayed_loop(case: Case) -> None:
    results = launch_on("threads", train_rank, case.num_ranks, (case,))
    delayed.assert_same(results, train_delayed(case))
    assert_replicas_are_equal(results, case.options["replicas"])


def test_equals_the_delayed_loop_in_processes() -> None:
    several = [
        shape((2, 1), 3, model="tied", optimizer="adamw", max_norm=0.3),
        shape((2, 1), 4, "pipedream", per_update=2, delays=(2, 0), optimizer="adam"),
    ]
    of_ranks = launch_on("gloo", delayed.train_many, 3, (several,))
    for case, results in zip(several, zip(*of_ranks)):
        delayed.assert_same(results, train_delayed(case))
        assert_replicas_are_equal(results, (2, 1))
