"""Recompute changes memory and time, and not one number; each body runs exactly twice."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modules import Stages
from plain import make_batch, squared_error
from scenario import Scenario, assert_alike
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stagewright.engine import Pipeline

MICROBATCHES = 4
MODES: list[Any] = ["off", "full", 0, 1, 3, 100, {0: "full", 2: 1}, {1: "off"}]
SCHEDULES = ["gpipe", "1f1b", "zb-h1"]


class Dropping(nn.Module):
    """Two dropouts, the second one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.drop, self.drop_in_place = nn.Dropout(0.3), nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop_in_place(self.second(self.drop(self.first(x).tanh())))
        return x + y


@pytest.mark.parametrize("recompute", MODES, ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_equals_plain_loop_with_the_same_dropout(name: str, recompute: Any) -> None:
    """The plain loop seeds by ``seed_of(seed, step, microbatch, stage)`` and keeps everything."""
    assert_alike(Scenario(Stages(Dropping)), name, num_ranks=3, num_microbatches=MICROBATCHES, recompute=recompute)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev", "interleaved-zb", "chimera", "hanayo"])
def test_dropout_does_not_depend_on_the_schedule(name: str) -> None:
    for recompute in ("off", "full"):
        assert_alike(Scenario(Stages(Dropping)), name, num_ranks=2, num_microbatches=4, recompute=recompute)


class Counting(nn.Module):
    """Notes the number of each call's microbatch, which its rows carry."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(round(x.detach()[0, 0].item(), 3))
        y: Tensor = self.linear(x) + x
        return y


@pytest.mark.parametrize(
    ("recompute", "times"), [("off", [1] * 4), ("full", [2] * 4), (1, [2, 2, 2, 1]), (3, [2, 1, 1, 1])]
)
@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb"])
def test_each_body_runs_exactly_twice(name: str, recompute: Any, times: list[int]) -> None:
    """And with k kept, the last k microbatches of the batch once."""
    modules = {stage: Stages(Counting)(stage) for stage in range(2)}
    with Pipeline(
        modules,
        schedule=name,
        num_microbatches=MICROBATCHES,
        num_chunks=2,
        loss_fn=squared_error,
        recompute=recompute,
    ) as pipe:
        for step in range(2):
            pipe.forward_backward(*make_batch(MICROBATCHES, step))
    for module in modules.values():
        counts = [module.calls.count(call) for call in dict.fromkeys(module.calls)]
        assert sorted(counts, reverse=True) == sorted(times * 2, reverse=True)


def test_recompute_can_be_said_for_each_stage() -> None:
    modules = {stage: Stages(Counting)(stage) for stage in range(3)}
    recompute: dict[int, Any] = {0: "full", 2: 2}
    with Pipeline(
        modules, schedule="interleaved", num_microbatches=4, num_chunks=3, loss_fn=squared_error, recompute=recompute
    ) as pipe:
        pipe.forward_backward(*make_batch(4, 0))
    assert [len(module.calls) for module in modules.values()] == [8, 4, 6]


def test_an_evaluation_runs_each_body_once() -> None:
    modules = {0: Stages(Counting)(0)}
    with Pipeline(modules, num_microbatches=4, loss_fn=squared_error, recompute="full") as pipe:
        pipe.eval_step(*make_batch(4, 0))
    assert len(modules[0].calls) == 4


class InPlaceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.mul_(2).relu_())
        return y


@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb"])
def test_what_a_body_overwrites_is_there_the_second_time(name: str) -> None:
    assert_alike(Scenario(Stages(InPlaceFirst)), name, num_ranks=1, recompute="full")
    assert_alike(Scenario(Stages(InPlaceFirst)), name, num_ranks=2, recompute="full")


class Inner(nn.Module):
    """A user's own checkpoint around a part of the stage, with dropout inside."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.inside = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.3), nn.Tanh(), nn.Linear(12, 6))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inside, self.before(x), use_reentrant=self.use_reentrant)
        return x + y


@pytest.mark.parametrize("recompute", ["off", "full", 1])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_users_own_checkpoint_inside_a_stage(name: str, use_reentrant: bool, recompute: Any) -> None:
    stages = Stages(lambda: Inner(use_reentrant))
    assert_alike(Scenario(stages), name, num_ranks=2, num_microbatches=MICROBATCHES, recompute=recompute)


class Reversible(nn.Module):
    """Checkpoints in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        def inner(value: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.second, value.tanh(), use_reentrant=False)
            return y

        def outer(value: Tensor) -> Tensor:
            y: Tensor = checkpoint(inner, self.first(value), use_reentrant=False)
            return y

        y: Tensor = checkpoint(outer, x, use_reentrant=False)
        return y


@pytest.mark.parametrize(("name", "recompute"), list(itertools.product(["1f1b", "zb-h1"], ["off", "full"])))
def test_checkpoints_in_checkpoints(name: str, recompute: str) -> None:
    assert_alike(Scenario(Stages(Reversible)), name, recompute=recompute)


class Structured(nn.Module):
    """A dict in, a dict out, a member without gradient among them, and a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Any, scale: Tensor) -> dict[str, Any]:
        x, count = (value, torch.zeros(1, dtype=torch.int64)) if isinstance(value, Tensor) else (value["x"], value["n"])
        return {"x": self.linear(x) * scale, "n": count + 1, "nothing": None}


def scale(step: int) -> dict[str, Any]:
    return {"scale": torch.linspace(1, 2, 9, dtype=torch.float64).unsqueeze(1) + step}


def loss_of_x(output: dict[str, Any], target: Tensor) -> Tensor:
    return squared_error(output["x"], target) * output["n"].item()


@pytest.mark.parametrize("name", SCHEDULES)
def test_structures_and_keywords_are_repeated_too(name: str) -> None:
    scenario = Scenario(Stages(Structured), loss=loss_of_x, keywords=scale)
    assert_alike(scenario, name, num_ranks=3, recompute="full")


def test_random_numbers_of_the_caller_are_left_alone() -> None:
    modules: Callable[[int], nn.Module] = Stages(Dropping)
    with Pipeline(modules, num_microbatches=2, loss_fn=squared_error, recompute="full") as pipe:
        batch = make_batch(4, 0)
        torch.manual_seed(3)
        expected = torch.rand(3)
        torch.manual_seed(3)
        pipe.forward_backward(*batch)
        assert torch.equal(torch.rand(3), expected)
