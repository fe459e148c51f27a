"""Bidirectional schedules hold each stage twice or more: gradients are summed over the copies, which stay bit-equal."""

from typing import Any

import pytest
import torch
from plain import make_batch, make_stage, squared_error
from torch import Tensor

from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.schedules import create

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.03, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}
SHAPES = [
    ("dualpipe", 2, 4, {}),
    ("dualpipe", 4, 8, {}),
    ("chimera", 2, 4, {}),
    ("chimera", 4, 4, {}),
    ("chimera", 4, 8, {"num_pairs": 2}),
]


def train(context: RankContext, name: str, num_microbatches: int, optimizer: str, options: dict[str, Any]) -> Any:
    with Pipeline(
        make_stage,
        schedule=name,
        num_microbatches=num_microbatches,
        loss_fn=squared_error,
        optimizer=OPTIMIZERS[optimizer],
        transport=context.transport,
        **options,
    ) as pipe:
        for step in range(4):
            pipe.train_step(*make_batch(2 * num_microbatches + 1, step))
        pipe.forward_backward(*make_batch(2 * num_microbatches + 1, 9))
        weights = {
            stage: {k: v.detach() for k, v in module.named_parameters()} for stage, module in pipe.modules.items()
        }
        gradients = {
            stage: {name: parameter.grad for name, parameter in module.named_parameters()}
            for stage, module in pipe.modules.items()
        }
        return weights, gradients


@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches", "options"), SHAPES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_copies_stay_bit_equal(
    name: str, num_ranks: int, num_microbatches: int, options: dict[str, Any], optimizer: str
) -> None:
    schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    arguments = (name, num_microbatches, optimizer, options)
    ranks = launch_local(train, num_ranks, backend="threads", args=arguments)
    for stage in range(schedule.num_stages):
        holders = schedule.placement.replicas_of(stage)
        assert len(holders) == len(schedule.placement.routes)
        for values in zip(*ranks):  # weights, then gradients
            copies: list[dict[str, Tensor]] = [values[rank][stage] for rank in holders]
            for copy in copies[1:]:
                for parameter, tensor in copies[0].items():
                    assert torch.equal(copy[parameter], tensor), (stage, parameter)


def test_each_copy_holds_the_gradient_of_all_microbatches() -> None:
    """Not its own half: the sum over both directions."""
    ((_, first), (_, second)) = launch_local(train, 2, backend="threads", args=("dualpipe", 4, "sgd", {}))
    _, alone = launch_local(train, 1, backend="threads", args=("interleaved", 4, "sgd", {"num_chunks": 2}))[0]
    for stage in (0, 1):
        for name, expected in alone[stage].items():
            torch.testing.assert_close(first[stage][name], expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(second[stage][name], expected, rtol=1e-12, atol=1e-12)
