"""Stages that take a known time; functions that processes can import."""

import time
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext
from stagewright.schedules import Costs, Timeline

FORWARD_SECONDS = 0.010
BACKWARD_SECONDS = 0.020
NUM_MICROBATCHES = 4


class Sleep(torch.autograd.Function):
    """Takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_SECONDS)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        time.sleep(BACKWARD_SECONDS)
        return dy


class SleepStage(nn.Module):
    """A scale, and a sleep."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x * self.scale)  # type: ignore[no-any-return, no-untyped-call]


def mean_of(output: Tensor, target: Tensor) -> Tensor:
    """A loss."""
    return (output * target).mean()


def measure(context: RankContext, schedule: str, num_microbatches: int) -> Timeline:
    """The timeline of the second step."""
    with Pipeline(
        SleepStage,
        schedule=schedule,
        num_microbatches=num_microbatches,
        loss_fn=mean_of,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        transport=context.transport,
    ) as pipe:
        for _ in range(2):
            pipe.train_step(torch.ones(num_microbatches, 1), torch.ones(num_microbatches, 1))
        return pipe.trace()


def measure_steps(context: RankContext, schedule: str, num_steps: int) -> tuple[list[Timeline], Costs]:
    """The timelines that are kept of some steps, and the costs of the last two."""
    with Pipeline(
        SleepStage,
        schedule=schedule,
        num_microbatches=NUM_MICROBATCHES,
        loss_fn=mean_of,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        transport=context.transport,
    ) as pipe:
        for _ in range(num_steps):
            pipe.train_step(torch.ones(NUM_MICROBATCHES, 3), torch.ones(NUM_MICROBATCHES, 3))
        return pipe.timelines(), pipe.calibrate(2)
