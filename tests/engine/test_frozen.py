"""Frozen stages and parameters, stages without parameters, parameters that nobody uses."""

from typing import Any

import pytest
import torch
from meanings import ALL, Trained, assert_same, make_batches, on_threads, train, train_plainly, under
from plain import make_batch, make_stage, momentum, squared_error
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext
from stagewright.schedules import Schedule

BATCHES = make_batches(4)


class Unused(nn.Module):
    """A stage with parameters that its output does not depend on."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.block = make_stage(stage)
        self.unused = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def frozen(stage: int) -> nn.Module:
    return make_stage(stage).requires_grad_(False)


def half_frozen(stage: int) -> nn.Module:
    module = make_stage(stage)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("widen" in name or "twice.bias" in name)
    return module


def without_parameters(stage: int) -> nn.Module:
    return nn.Tanh()


def unused(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return Unused(stage)


class Build:
    """stage -> module, of the kinds given."""

    def __init__(self, *kinds: Any) -> None:
        self._kinds = kinds

    def __call__(self, stage: int) -> nn.Module:
        return self._kinds[stage](stage)


# The first stages frozen, the last ones, some in between; nothing to train at all on some ranks.
KINDS = [
    (frozen, half_frozen, without_parameters, unused),
    (half_frozen, frozen, unused, frozen),
    (without_parameters, make_stage, frozen, without_parameters),
    (unused, without_parameters, half_frozen, make_stage),
]


@under(ALL)
@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "-".join(kind.__name__ for kind in kinds))
def test_what_is_not_trained_stays_and_what_is_trained_moves(schedule: Schedule, kinds: Any) -> None:
    build = Build(*kinds[: schedule.num_stages])
    results = on_threads(train, schedule, BATCHES, {"build_stage": build, "max_norm": 0.5})
    plain = train_plainly(schedule.num_stages, BATCHES, build_stage=build, max_norm=0.5)
    assert_same(results, plain)
    assert {key for key, weight in plain.weights.items() if not torch.equal(weight, initial(build, key))}


def initial(build: Build, key: tuple[int, str]) -> Tensor:
    stage, name = key
    return dict(build(stage).named_parameters())[name]


class CountingFactory:
    """Notes the names that it is called with."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, named: Any) -> torch.optim.Optimizer:
        self.calls.append([name for name, _ in named])
        return momentum(named)


def train_counting(context: RankContext, schedule: Schedule, build: Build) -> tuple[Any, ...]:
    factory = CountingFactory()
    with Pipeline(
        build, schedule=schedule, loss_fn=squared_error, optimizer=factory, transport=context.transport, share_loss=True
    ) as pipe:
        losses = [pipe.train_step(*batch).item() for batch in BATCHES[:2]]
        named = [name for name, _ in pipe.named_parameters()]
        assert pipe.optimizer is not None
        assert (pipe.optimizer.param_groups[0]["params"] == []) == (not factory.calls)
        state = pipe.state_dict()
        pipe.load_state_dict(state)
        return factory.calls, named, losses


@under(ALL)
def test_an_optimizer_without_parameters_is_not_made_and_no_error(schedule: Schedule) -> None:
    """It is called once on a rank with something to train, with the names of that."""
    last = schedule.num_stages - 1
    build = Build(*[frozen] * last, half_frozen)
    results = on_threads(train_counting, schedule, build)
    names = [name for name, parameter in half_frozen(last).named_parameters() if parameter.requires_grad]
    for rank, (calls, named, losses) in enumerate(results):
        expected = [names] if rank in schedule.placement.replicas_of(last) else []
        assert calls == expected
        assert [named] == (expected or [[]])
        assert losses == results[0][2]
    assert results[0][2][0] != results[0][2][1]


@under(ALL)
def test_a_model_of_which_nothing_is_trained_has_losses(schedule: Schedule) -> None:
    build = Build(*[without_parameters, frozen][: schedule.num_stages], *[frozen] * (schedule.num_stages - 2))
    results: list[Trained] = on_threads(train, schedule, BATCHES, {"build_stage": build, "share_loss": True})
    model = nn.Sequential(*[build(stage) for stage in range(schedule.num_stages)])
    expected = [squared_error(model(x), y).item() for x, y in BATCHES[:-1]]
    for result in results:
        assert [loss.item() for loss in result.losses] == pytest.approx(expected, rel=1e-12)
        assert not result.gradients


def step_without_optimizer(context: RankContext, schedule: Schedule) -> None:
    with Pipeline(make_stage, schedule=schedule, loss_fn=squared_error, transport=context.transport) as pipe:
        pipe.train_step(*make_batch(9, 0))


@under([ALL[1]])
def test_a_step_without_an_optimizer_is_refused(schedule: Schedule) -> None:
    """It would silently train nothing."""
    with pytest.raises(ValueError, match="train_step makes an update: give the Pipeline an optimizer, or call forw"):
        on_threads(step_without_optimizer, schedule)
