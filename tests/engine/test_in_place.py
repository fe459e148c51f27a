"""A stage may overwrite what it received, exactly where it may in one process."""

from collections.abc import Callable

import pytest
import torch
from crossing import Linear, Relu
from modules import Stages
from plain import make_batch, squared_error
from scenario import Scenario, assert_alike
from torch import Tensor, nn

from stagewright.engine import Pipeline, launch_local
from stagewright.engine.launch.context import RankContext


class Tanh(nn.Module):
    """Its last operation needs its own output in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).tanh()
        return y


def train(context: RankContext, schedule: str, num_chunks: int) -> None:
    pipe = Pipeline(
        Stages(Tanh, Relu),
        schedule=schedule,
        num_microbatches=3,
        num_chunks=num_chunks,
        loss_fn=squared_error,
        transport=context.transport,
    )
    pipe.forward_backward(*make_batch(6, 0))


def test_one_process_refuses_to_spoil_what_its_backward_needs() -> None:
    """The fact that the next test holds the engine to."""
    first, second = Stages(Tanh)(0), Stages(Relu)(1)
    x, y = make_batch(6, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared_error(second(first(x)), y).backward()


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-zb"])
def test_one_rank_refuses_it_too(schedule: str) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        launch_local(train, 1, backend="threads", args=(schedule, 2))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_two_ranks_have_nothing_to_spoil(schedule: str) -> None:
    """What was sent is a copy."""
    assert_alike(Scenario(Stages(nn.Sequential, Linear, Relu)), schedule, num_ranks=3)
    launch_local(train, 2, backend="threads", args=(schedule, 1))


class ReluFirst(nn.Module):
    """Overwrites the user's own batch, and needs it in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.relu_())
        return y


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_the_first_stage_may_overwrite_the_batch(schedule: str) -> None:
    """Its microbatches are views of one batch, and yet each may be overwritten without a word about the others."""
    assert_alike(Scenario(Stages(ReluFirst, Linear)), schedule, num_microbatches=4)


def overwriting_loss(output: Tensor, target: Tensor) -> Tensor:
    return squared_error(output, target.clamp_(min=0)) + (output * target).mean()


def doubled(step: int) -> dict[str, Tensor]:
    return {"scale": torch.linspace(1, 2, 9, dtype=torch.float64).unsqueeze(1)}


class OverwritesItsKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * scale.add_(1)
        return y


def test_loss_and_stages_may_overwrite_targets_and_keywords() -> None:
    scenario = Scenario(Stages(OverwritesItsKeyword), loss=overwriting_loss, keywords=doubled)
    assert_alike(scenario, "gpipe", num_ranks=1, num_microbatches=4)


@pytest.mark.parametrize("kind", [nn.ReLU, nn.LeakyReLU, nn.ELU, nn.Hardswish])
def test_activations_in_place_between_linears(kind: Callable[..., nn.Module]) -> None:
    def stage() -> nn.Module:
        return nn.Sequential(kind(inplace=True), nn.Linear(6, 6))

    for schedule, num_ranks in (("interleaved-zb", 1), ("zb-h1", 2)):
        assert_alike(Scenario(Stages(Linear, stage)), schedule, num_ranks=num_ranks)
