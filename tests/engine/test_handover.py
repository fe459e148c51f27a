"""Neighbouring stages on one rank hand over the very tensors; those on two ranks never share memory."""

from dataclasses import dataclass, field

import pytest
import torch
from plain import make_batch, squared_error
from shapes import label, synchronous_names
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.schedules import Schedule, create


@dataclass
class Seen:
    """The tensors that went in and out of a stage, kept alive so that no address is used twice."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    input_gradients: list[Tensor] = field(default_factory=list)
    output_gradients: list[Tensor] = field(default_factory=list)


class Watched(nn.Module):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.seen.inputs.append(x.detach())
        self.seen.outputs.append(y.detach())
        if x.requires_grad:
            x.register_hook(self.seen.input_gradients.append)
        y.register_hook(self.seen.output_gradients.append)
        return y


def addresses(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def train(context: RankContext, schedule: Schedule, seen: list[Seen]) -> None:
    pipe = Pipeline(
        lambda stage: Watched(seen[stage]), schedule=schedule, loss_fn=squared_error, transport=context.transport
    )
    pipe.forward_backward(*make_batch(8, 0))


def neighbours(schedule: Schedule) -> list[int]:
    """The stages whose next one is on the same rank."""
    rank_of = schedule.placement.rank_of
    return [stage for stage in range(schedule.num_stages - 1) if rank_of(stage) == rank_of(stage + 1)]


def turning_schedules() -> list[Schedule]:
    """Those that turn at the last rank: V and waves."""
    schedules = (create(name, num_ranks=2, num_microbatches=4) for name in synchronous_names())
    return [schedule for schedule in schedules if neighbours(schedule)]


@pytest.mark.parametrize("schedule", turning_schedules(), ids=label)
def test_same_rank_hands_over_without_copying(schedule: Schedule) -> None:
    together = neighbours(schedule)
    seen = [Seen() for _ in range(schedule.num_stages)]
    launch_local(train, 2, backend="threads", args=(schedule, seen))
    for stage in range(schedule.num_stages - 1):
        upper, lower = seen[stage], seen[stage + 1]
        activations = zip(sorted(addresses(upper.outputs)), sorted(addresses(lower.inputs)), strict=True)
        gradients = zip(
            sorted(addresses(lower.input_gradients)), sorted(addresses(upper.output_gradients)), strict=True
        )
        for theirs, ours in (*activations, *gradients):
            assert (theirs == ours) == (stage in together)


def test_one_rank_never_copies() -> None:
    """P=1, three chunks: no copy anywhere between x and the loss."""
    schedule = create("interleaved", num_ranks=1, num_microbatches=3, num_chunks=3)
    seen = [Seen() for _ in range(3)]
    launch_local(train, 1, backend="threads", args=(schedule, seen))
    assert addresses(seen[0].outputs) == addresses(seen[1].inputs)
    assert addresses(seen[1].outputs) == addresses(seen[2].inputs)


def test_an_identity_stage_passes_the_same_memory_on() -> None:
    """And the gradient passes through it unchanged."""
    x, y = make_batch(4, 0)
    first, last = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
    stages = {0: first, 1: nn.Identity(), 2: last}
    schedule = create("interleaved", num_ranks=1, num_microbatches=2, num_chunks=3)
    with Pipeline(stages, schedule=schedule, loss_fn=squared_error) as pipe:
        pipe.forward_backward(x, y)
    expected = torch.autograd.grad(squared_error(last(first(x)), y), [first.weight, last.weight])
    torch.testing.assert_close([first.weight.grad, last.weight.grad], list(expected), rtol=1e-12, atol=1e-12)
