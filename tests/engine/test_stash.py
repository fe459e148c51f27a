"""A stash holds what its backward needs, no longer than until then, and as many entries as simulated."""

import pytest
import torch
from metering import SCALARS, metering
from modules import Stages
from plain import make_batch, make_stage, squared_error
from shapes import label, schedules_of, synchronous_names
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.engine.stages.randomness import Seeds
from stagewright.engine.stages.stage import Stage
from stagewright.engine.value import pack
from stagewright.schedules import Schedule, simulate

CPU = torch.device("cpu")


class Wide(nn.Module):
    """A small input, a large output that its backward does not need, and something large in between that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.again = nn.Linear(8, 4000), nn.Linear(4000, 4000)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.again(self.widen(x))
        return y


LARGE = 100 * 4000 * 8  # bytes of its output


def forward(stage: Stage, microbatch: int) -> None:
    """Forward and send: what was sent is dropped."""
    packed = pack(torch.ones(100, 8, dtype=torch.float64, requires_grad=True), "the test")
    stage.hand_on(microbatch, stage.forward(microbatch, (0, microbatch), packed, {}, 0))


@pytest.mark.parametrize("splits_backward", [False, True])
def test_a_sent_activation_is_released(splits_backward: bool) -> None:
    stage = Stage(1, Stages(Wide)(0), Seeds(0, CPU), splits_backward=splits_backward)
    with metering() as meter:
        forward(stage, 0)
    assert LARGE <= meter.held < 1.1 * LARGE, "what lies in between is kept, the output is not"


@pytest.mark.parametrize("splits_backward", [False, True])
def test_recompute_keeps_the_input_alone(splits_backward: bool) -> None:
    stage = Stage(1, Stages(Wide)(0), Seeds(0, CPU), splits_backward=splits_backward, num_kept=0)
    with metering() as meter:
        forward(stage, 0)
    assert meter.held < 0.1 * LARGE


@pytest.mark.parametrize("num_kept", [None, 0])
def test_nothing_is_left_after_the_backward(num_kept: int | None) -> None:
    stage = Stage(1, Stages(Wide)(0), Seeds(0, CPU), num_kept=num_kept)
    dy = torch.ones(100, 4000, dtype=torch.float64)
    forward(stage, 0)
    stage.backward(0, [dy])  # gradients come into being
    with metering() as meter:
        forward(stage, 1)
        stage.backward(1, [dy])
    assert meter.held <= SCALARS
    assert not stage.stash


class Counting(nn.Module):
    """Notes how many entries its rank holds whenever it is called; nothing but a forward adds one."""

    def __init__(self, inner: nn.Module, stages: list[Stage], held: list[int]) -> None:
        super().__init__()
        self.inner, self.stages, self.held = inner, stages, held

    def forward(self, x: Tensor) -> Tensor:
        self.held.append(sum(len(stage.stash) + len(stage._pending) for stage in self.stages))
        y: Tensor = self.inner(x)
        return y


def most_entries(context: RankContext, schedule: Schedule) -> int:
    with Pipeline(make_stage, schedule=schedule, loss_fn=squared_error, transport=context.transport) as pipe:
        held: list[int] = []
        stages = list(pipe._stages.values())
        for stage in stages:
            stage.module = Counting(stage.module, stages, held)
        pipe.forward_backward(*make_batch(schedule.num_microbatches, 0))
        return max(held)


@pytest.mark.parametrize(
    "schedule",
    [schedule for name in synchronous_names() for schedule in list(schedules_of(name, (2, 4), (8,)))[-2:]],
    ids=label,
)
def test_a_rank_holds_as_many_entries_as_simulated(schedule: Schedule) -> None:
    measured = launch_local(most_entries, schedule.num_ranks, backend="threads", args=(schedule,))
    assert measured == list(simulate(schedule.program()).peak_stash)
