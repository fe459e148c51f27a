"""Any model, trained by a pipeline and by a plain loop over the same microbatches with the same random numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from plain import TOLERANCE, Result, assert_nothing_in_flight, momentum, note_parameters, squared_error
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.engine.stages.randomness import seed_of
from stagewright.schedules import Schedule, create

SEED = 5


def rows_of_six(step: int) -> tuple[Any, Any]:
    """The usual batch: 9 rows of 6 numbers, and as many targets."""
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(9, 6, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def nothing(step: int) -> dict[str, Any]:
    """No keyword arguments."""
    return {}


@dataclass(frozen=True)
class Scenario:
    """What is trained.

    Args:
        stage: stage -> module, freshly made and the same each time.
        batch: step -> (x, y).
        loss: (output, target) -> mean.
        keywords: step -> further arguments of every stage.
        split_spec: how those are cut.
        steps: updates.
    """

    stage: Callable[[int], nn.Module]
    batch: Callable[[int], tuple[Any, Any]] = rows_of_six
    loss: Callable[[Any, Any], Tensor] = squared_error
    keywords: Callable[[int], dict[str, Any]] = nothing
    split_spec: Mapping[str, int | None] = field(default_factory=dict)
    steps: int = 2


def cut(value: Any, count: int, dimension: int | None = 0) -> list[Any]:
    """Cut every tensor of a value."""

    def part(index: int) -> Any:
        return pytree.tree_map_only(
            Tensor, lambda t: t if dimension is None else t.tensor_split(count, dimension)[index], value
        )

    return [part(index) for index in range(count)]


def cut_keywords(scenario: Scenario, step: int, count: int) -> list[dict[str, Any]]:
    """The keyword arguments of each microbatch."""
    columns = {
        name: cut(value, count, scenario.split_spec.get(name, 0)) for name, value in scenario.keywords(step).items()
    }
    return [{name: column[index] for name, column in columns.items()} for index in range(count)]


def train_plainly(scenario: Scenario, num_stages: int, num_microbatches: int) -> Result:
    """One process, one microbatch after the other, stage after stage."""
    modules = {index: scenario.stage(index) for index in range(num_stages)}
    trained = [parameter for module in modules.values() for parameter in module.parameters() if parameter.requires_grad]
    optimizer = momentum(trained) if trained else None
    result = Result()
    for step in range(scenario.steps + 1):
        if optimizer is not None:
            optimizer.zero_grad()
        x, y = scenario.batch(step)
        rows = [_rows(part) for part in cut(x, num_microbatches)]
        parts = zip(cut(x, num_microbatches), cut(y, num_microbatches), cut_keywords(scenario, step, num_microbatches))
        batch_loss = 0.0
        for microbatch, (value, target, keywords) in enumerate(parts):
            for index, module in modules.items():
                torch.manual_seed(seed_of(SEED, step, microbatch, index))
                value = module(value, **keywords)
            loss = scenario.loss(value, target) * (rows[microbatch] / sum(rows))
            batch_loss += loss.item()
            if loss.requires_grad:
                loss.backward()
        if step < scenario.steps:
            result.losses.append(batch_loss)
            if optimizer is not None:
                optimizer.step()
    note_parameters(result, modules)
    return result


def train_rank(context: RankContext, scenario: Scenario, options: dict[str, Any]) -> Result:
    """One rank's share."""
    torch.set_num_threads(1)
    result = Result()
    pipe = Pipeline(
        scenario.stage,
        loss_fn=scenario.loss,
        optimizer=momentum,
        transport=context.transport,
        seed=SEED,
        share_loss=True,
        split_spec=scenario.split_spec,
        dynamic_shapes=True,
        **options,
    )
    for step in range(scenario.steps):
        loss = pipe.train_step(*scenario.batch(step), **scenario.keywords(step))
        assert loss is not None
        assert not loss.requires_grad
        result.losses.append(loss.item())
        assert_nothing_in_flight(pipe)
    pipe.forward_backward(*scenario.batch(scenario.steps), **scenario.keywords(scenario.steps))
    note_parameters(result, pipe.modules)
    return result


def assert_alike(
    scenario: Scenario,
    schedule: str | Schedule = "1f1b",
    *,
    num_ranks: int = 2,
    num_microbatches: int = 4,
    backend: Any = "threads",
    tolerance: float = TOLERANCE,
    num_chunks: int | None = None,
    **options: Any,
) -> None:
    """The pipeline's losses, weights and gradients are those of the plain loop."""
    if isinstance(schedule, str):
        shape = {} if num_chunks is None else {"num_chunks": num_chunks}
        schedule = create(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, **shape)
    plain = train_plainly(scenario, schedule.num_stages, schedule.num_microbatches)
    options = {"schedule": schedule, **options}
    results = launch_local(train_rank, schedule.num_ranks, backend=backend, args=(scenario, options))
    compare(results, plain, tolerance)


def compare(results: list[Result], plain: Result, tolerance: float = TOLERANCE) -> None:
    """Losses, weights and gradients, those that are None included."""
    for result in results:
        torch.testing.assert_close(result.losses, plain.losses, rtol=tolerance, atol=tolerance)
        for ours, theirs in ((result.weights, plain.weights), (result.gradients, plain.gradients)):
            expected = {key: tensor for key, tensor in theirs.items() if key in result.weights}
            torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    assert {key for result in results for key in result.weights} == set(plain.weights)


def _rows(value: Any) -> int:
    return next(leaf.shape[0] for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
