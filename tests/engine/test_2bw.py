"""2BW trains as a plain loop does that applies W(t+1) = W(t) - lr * g(W(t-1)), to the last digits of float64."""

from collections.abc import Iterator, Sequence
from typing import Any, get_args

import pytest
import torch
from delayed import OPTIMIZERS, Action, Case, assert_same, label, train_delayed, train_many, train_rank
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import Kind, launch_on
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext, launch_local

ACTIONS: Sequence[Action] = get_args(Action)


def assert_trains_as_plainly(case: Case, kind: Kind = "threads") -> None:
    assert_same(launch_on(kind, train_rank, case.num_ranks, (case,)), train_delayed(case))


# One parameter


class Scale(nn.Module):
    """One weight on the first stage, nothing to train on the others."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        if stage == 0:
            self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w if hasattr(self, "w") else x


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return (output**2).mean() / 2


def train_one_parameter(context: RankContext) -> list[float]:
    ones = torch.ones(4, 1, dtype=torch.float64)
    found = []
    with Pipeline(
        Scale,
        schedule="2bw",
        num_microbatches=4,
        loss_fn=half_square,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        transport=context.transport,
    ) as pipe:
        for _ in range(6):
            found += [weight.item() for weight in pipe.state_dict()["stages"].get(0, {}).values()]
            pipe.train_step(ones, ones)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_one_parameter(num_ranks: int) -> None:
    """The loss w^2/2 has gradient w: W1 = 1 - .1 * 1, W2 = .9 - .1 * 1, W3 = .8 - .1 * .9, …"""
    found, *others = launch_local(train_one_parameter, num_ranks, backend="threads")
    assert found == pytest.approx([1, 0.9, 0.8, 0.71, 0.63, 0.559], rel=1e-14)
    assert others == [[]] * (num_ranks - 1)


# All that a training may have


def shapes(most: int = 2) -> list[tuple[int, int]]:
    """(P, M): from the fewest microbatches, P-1, to some more than ranks."""
    return [(num_ranks, max(num_ranks - 1, 1) + more) for num_ranks in range(1, 5) for more in range(most + 1)]


VARIANTS: Sequence[dict[str, Any]] = [
    {"optimizer": "sgd"},
    {"optimizer": "momentum", "decays": True, "actions": {0: "flush", 3: "evaluate"}},
    {"optimizer": "adam", "model": "dropout", "recompute": "full", "actions": {2: "save"}},
    {"optimizer": "adamw", "model": "dropout", "recompute": 1, "decays": True, "max_norm": 0.3},
    {"optimizer": "adamw", "max_norm": 0.3, "actions": {1: "predict", 4: "flush", 5: "evaluate"}},
]
TIED: Sequence[dict[str, Any]] = [
    {"optimizer": "momentum", "model": "tied", "actions": {2: "flush"}},
    {"optimizer": "adamw", "model": "tied", "max_norm": 0.3, "decays": True, "recompute": "full"},
]


def cases() -> Iterator[Case]:
    """Each variant with some shapes, so that every shape has several."""
    for index, (num_ranks, num_microbatches) in enumerate(shapes()):
        for turn in range(2):
            yield Case(num_ranks, num_microbatches, **VARIANTS[(index + 2 * turn) % len(VARIANTS)])
        if num_ranks > 1:
            yield Case(num_ranks, num_microbatches, **TIED[index % 2])


@pytest.mark.parametrize("case", list(cases()), ids=label)
def test_equals_the_plain_loop(case: Case) -> None:
    assert_trains_as_plainly(case)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), shapes(4))
def test_equals_the_plain_loop_in_every_way(num_ranks: int, num_microbatches: int) -> None:
    variants = [*VARIANTS, *(TIED if num_ranks > 1 else ())]
    more = [{**variant, "optimizer": optimizer} for variant in variants for optimizer in OPTIMIZERS]
    for variant in more:
        assert_trains_as_plainly(Case(num_ranks, num_microbatches, **variant))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_equals_the_plain_loop_in_processes(num_ranks: int) -> None:
    variants = [VARIANTS[1], VARIANTS[3], TIED[1]]
    several = [Case(num_ranks, num_ranks - 1 + 2 * index, **variant) for index, variant in enumerate(variants)]
    results = launch_on("gloo", train_many, num_ranks, (several,))
    for index, case in enumerate(several):
        assert_same([of_rank[index] for of_rank in results], train_delayed(case))


# Between any two batches


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from([(1, 1), (2, 1), (2, 3), (3, 2), (3, 4)]),
    actions=st.dictionaries(st.integers(0, 6), st.sampled_from(ACTIONS), max_size=5),
    max_norm=st.sampled_from([None, 0.3]),
)
def test_whatever_drains_it_training_goes_on_by_the_same_rule(
    shape: tuple[int, int], actions: dict[int, Action], max_norm: float | None
) -> None:
    """The older version is kept: the next batch runs on it, as if nobody had looked. The newest one is evaluated."""
    assert_trains_as_plainly(Case(*shape, num_batches=7, actions=actions, max_norm=max_norm))
