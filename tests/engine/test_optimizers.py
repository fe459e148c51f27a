"""Optimizers: any of torch's, with groups by name and schedulers, one for all the stages of a rank."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from meanings import (
    ALL,
    TWO_COPIES,
    Trained,
    assert_same,
    make_batches,
    on_threads,
    train,
    train_plainly,
    under,
    weights_of,
)
from plain import make_batch, make_stage, momentum, squared_error
from torch import nn, optim

from stagewright.engine import Pipeline, RankContext
from stagewright.schedules import Schedule, create

BATCHES = make_batches(5)

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": partial(optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": partial(optim.AdamW, lr=0.01),
    "AdamW, one by one": partial(optim.AdamW, lr=0.01, foreach=False),
    "AdamW, foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "AdamW, fused": partial(optim.AdamW, lr=0.01, fused=True),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "Adagrad": partial(optim.Adagrad, lr=0.05),
    "Adadelta": partial(optim.Adadelta, lr=0.5),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "ASGD": partial(optim.ASGD, lr=0.05),
    "Adafactor": partial(optim.Adafactor, lr=0.01),
}
SOME = [
    create("1f1b", num_ranks=2, num_microbatches=4),
    create("interleaved-zb", num_ranks=2, num_microbatches=4, num_chunks=2),
    *TWO_COPIES[:1],
]


@under(SOME)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_any_optimizer_of_torch(schedule: Schedule, optimizer: Any) -> None:
    results = on_threads(train, schedule, BATCHES, {"optimizer": optimizer})
    assert_same(results, train_plainly(schedule.num_stages, BATCHES, optimizer=optimizer), 1e-9)


def grouped(named: Any) -> optim.Optimizer:
    """Matrices with weight decay and a rate of their own; the names choose, and other parameters get none of it."""
    named = list(named)
    return optim.AdamW(
        [
            {"params": [parameter for name, parameter in named if name.endswith("bias")], "weight_decay": 0.0},
            {"params": [parameter for name, parameter in named if "norm.weight" in name], "lr": 0.02},
            {"params": [parameter for name, parameter in named if name.endswith("weight") and "norm" not in name]},
        ],
        lr=0.01,
        weight_decay=0.3,
    )


@under(ALL)
def test_groups_by_name(schedule: Schedule) -> None:
    """Also where a name occurs in several stages of a rank."""
    results = on_threads(train, schedule, BATCHES, {"optimizer": grouped})
    assert_same(results, train_plainly(schedule.num_stages, BATCHES, optimizer=grouped))


def names_of(context: RankContext, schedule: Schedule) -> tuple[list[str], list[str]]:
    with Pipeline(make_stage, schedule=schedule, optimizer=momentum, transport=context.transport) as pipe:
        assert pipe.optimizer is not None
        (group,) = pipe.optimizer.param_groups
        named = dict(pipe.named_parameters())
        assert all(one is other for one, other in zip(group["params"], named.values(), strict=True))
        return group["param_names"], list(named)


def test_names_are_those_in_the_stages() -> None:
    """For the optimizer, whatever the schedule; where a rank names all that it trains, no two are called the same."""
    plain = [name for name, _ in make_stage(0).named_parameters()]
    names = on_threads(names_of, create("interleaved", num_ranks=2, num_microbatches=4, num_chunks=2))
    for rank, (of_optimizer, of_rank) in enumerate(names):
        assert of_optimizer == plain + plain
        assert of_rank == [f"stage{stage}.{name}" for stage in (rank, rank + 2) for name in plain]
    assert on_threads(names_of, create("1f1b", num_ranks=2, num_microbatches=4)) == [(plain, plain)] * 2


def warm(step: int) -> float:
    """A rate that changes with every step."""
    return 1.0 / (1 + step)


def train_with_scheduler(context: RankContext, schedule: Schedule) -> Trained:
    torch.set_num_threads(1)
    result = Trained()
    with Pipeline(
        make_stage,
        schedule=schedule,
        loss_fn=squared_error,
        optimizer=grouped,
        transport=context.transport,
    ) as pipe:
        rates = optim.lr_scheduler.LambdaLR(pipe.optimizer, warm)
        for batch in BATCHES:
            result.losses.append(pipe.train_step(*batch))
            rates.step()
        result.weights = weights_of(pipe.modules)
    return result


@under(ALL)
def test_a_scheduler_stepped_on_every_rank_alike(schedule: Schedule) -> None:
    results = on_threads(train_with_scheduler, schedule)
    modules = {stage: make_stage(stage) for stage in range(schedule.num_stages)}
    model = nn.Sequential(*modules.values())
    optimizer = grouped(model.named_parameters())
    rates = optim.lr_scheduler.LambdaLR(optimizer, warm)
    plain = Trained()
    for x, y in BATCHES:
        optimizer.zero_grad()
        loss = squared_error(model(x), y)
        loss.backward()
        plain.losses.append(loss.detach())
        optimizer.step()
        rates.step()
    plain.weights = weights_of(modules)
    assert_same(results, plain)


class Counting(optim.AdamW):
    """Counts its steps, and the parameters of each."""

    def __init__(self, named: Any, **options: Any) -> None:
        super().__init__(named, lr=0.01, **options)
        self.steps: list[int] = []

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        self.steps.append(sum(parameter.grad is not None for parameter in group["params"]))
        return super().step(closure)


def count_steps(context: RankContext, schedule: Schedule, options: dict[str, bool]) -> tuple[list[int], int]:
    with Pipeline(
        make_stage,
        schedule=schedule,
        loss_fn=squared_error,
        optimizer=partial(Counting, **options),
        transport=context.transport,
    ) as pipe:
        for step in range(3):
            pipe.train_step(*make_batch(9, step))
        assert isinstance(pipe.optimizer, Counting)
        return pipe.optimizer.steps, len(list(pipe.named_parameters()))


@under(ALL)
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_one_step_a_rank_and_not_one_a_stage(schedule: Schedule, options: dict[str, bool]) -> None:
    """With all the rank's parameters, which is what foreach and fused optimizers are for."""
    for rank, (steps, num_parameters) in enumerate(on_threads(count_steps, schedule, options)):
        assert steps == [num_parameters] * 3
        assert num_parameters == 7 * len(schedule.placement.stages_of(rank))


def lbfgs(named: Any) -> optim.Optimizer:
    return optim.LBFGS([parameter for _, parameter in named])


def forgotten(named: Any) -> None:
    """A factory without its return."""


@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        (lbfgs, ValueError, "LBFGS computes the loss anew within each step"),
        (forgotten, TypeError, "optimizer is called with .name, parameter. pairs and returns an Optimizer: got None"),
    ],
)
def test_what_cannot_step_a_stage_is_refused_when_built(optimizer: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        on_threads(train, SOME[0], BATCHES, {"optimizer": optimizer})
