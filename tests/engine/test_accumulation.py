"""Accumulation: gradients of several batches add up exactly, whatever an update needs of all ranks."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from meanings import ALL, Named, Trained, assert_close, gradients_of, on_threads, together, under, weights_of
from plain import make_batch, make_stage, momentum, squared_error
from tied import TIED, Build, make_text, mean_over_tokens, sum_and_count
from torch import nn

from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.schedules import Schedule, create

Text = Sequence[tuple[torch.Tensor, torch.Tensor]]

# Three batches of different sizes before each of two updates.
ROUNDS = [[make_text(rows, step) for rows in (9, 8, 13)] for step in (0, 1)]


def backward_repeatedly(context: RankContext, schedule: Schedule, num_calls: int) -> Named:
    with Pipeline(make_stage, schedule=schedule, loss_fn=squared_error, transport=context.transport) as pipe:
        for _ in range(num_calls):
            pipe.forward_backward(*make_batch(9, 0))
        return gradients_of(pipe.modules)


@under(ALL)
def test_two_calls_give_twice_the_gradient_to_the_last_bit(schedule: Schedule) -> None:
    once, twice = (together(on_threads(backward_repeatedly, schedule, num_calls)) for num_calls in (1, 2))
    assert set(once) == set(twice)
    for key, gradient in once.items():
        assert torch.equal(twice[key], 2 * gradient), key


def accumulate(context: RankContext, schedule: Schedule, last: str, max_norm: float | None) -> Trained:
    """The last batch of a round comes with the trainer's own step, with that of its own, or with train_step's."""
    torch.set_num_threads(1)
    result = Trained()
    with Pipeline(
        Build(schedule.num_stages),
        schedule=schedule,
        loss_fn=sum_and_count,
        optimizer=momentum if last == "train_step" else None,
        transport=context.transport,
        tied=TIED,
        max_norm=max_norm if last == "train_step" else None,
        dynamic_shapes=True,
    ) as pipe:
        named = list(pipe.named_parameters())
        own = momentum(named) if last == "own step" else None
        for batches in ROUNDS:
            for batch in batches[:-1]:
                pipe.forward_backward(*batch)
            if own is None:
                pipe.train_step(*batches[-1])
                result.norms.append(pipe.grad_norm)
            else:
                pipe.forward_backward(*batches[-1])
                if max_norm is not None:
                    result.norms.append(pipe.clip_grad_norm_(max_norm))
                own.step()
                own.zero_grad()
        result.weights = weights_of(pipe.modules)
        pipe.forward_backward(*ROUNDS[0][0])
        result.gradients = gradients_of(pipe.modules)
    return result


def accumulate_plainly(num_stages: int, max_norm: float | None) -> Trained:
    build = Build(num_stages, tie=True)
    modules = {stage: build(stage) for stage in range(num_stages)}
    model = nn.Sequential(*modules.values())
    optimizer = momentum(model.parameters())
    result = Trained()
    for batches in ROUNDS:
        for x, y in batches:
            mean_over_tokens(model(x), y).backward()
        if max_norm is not None:
            result.norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    result.weights = weights_of(modules)
    x, y = ROUNDS[0][0]
    mean_over_tokens(model(x), y).backward()
    result.gradients = gradients_of(modules)
    return result


@under(ALL)
@pytest.mark.parametrize("max_norm", [None, 0.4])
@pytest.mark.parametrize("last", ["own step", "train_step"])
def test_batches_add_up_before_a_step(schedule: Schedule, last: str, max_norm: float | None) -> None:
    """With (sum, count), tied weights and copies, also where the whole sum is clipped."""
    results = on_threads(accumulate, schedule, last, max_norm)
    plain = accumulate_plainly(schedule.num_stages, max_norm)
    assert_close([result.weights for result in results], plain.weights)
    assert_close([result.gradients for result in results], plain.gradients)
    if max_norm is not None:
        assert min(plain.norms) > max_norm  # it does clip
        for result in results:
            assert result.norms == pytest.approx(plain.norms, rel=1e-12)


def keep_zeros(context: RankContext, schedule: Schedule) -> Named:
    """A trainer that fills gradients with zeros instead of dropping them."""
    with Pipeline(make_stage, schedule=schedule, loss_fn=squared_error, transport=context.transport) as pipe:
        optimizer = torch.optim.SGD(pipe.named_parameters(), lr=0.0)
        pipe.forward_backward(*make_batch(9, 1))
        before = {name: parameter.grad for name, parameter in pipe.named_parameters()}
        optimizer.zero_grad(set_to_none=False)
        pipe.forward_backward(*make_batch(9, 0))
        for name, parameter in pipe.named_parameters():
            assert parameter.grad is before[name]  # whoever holds on to a gradient sees it grow
        return gradients_of(pipe.modules)


@under(ALL)
def test_gradients_that_were_zeroed_stay_where_they_are(schedule: Schedule) -> None:
    zeroed, fresh = together(on_threads(keep_zeros, schedule)), together(on_threads(backward_repeatedly, schedule, 1))
    for key, gradient in fresh.items():
        assert torch.equal(zeroed[key], gradient), key


class FailsOnce(nn.Module):
    """A stage that raises in the backward of the third microbatch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_stage(0)
        self.num_left = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_left -= 1
        output = self.inner(x)
        if self.num_left == 0:
            output.register_hook(_fail)
        return output


def _fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("a gradient that cannot be")


def fail_in_the_middle(context: RankContext) -> Any:
    schedule = create("1f1b", num_ranks=1, num_microbatches=2)
    with Pipeline({0: FailsOnce()}, schedule=schedule, loss_fn=squared_error, transport=context.transport) as pipe:
        pipe.forward_backward(*make_batch(9, 0))
        before = gradients_of(pipe.modules)
        with pytest.raises(RuntimeError, match="cannot be"):
            pipe.forward_backward(*make_batch(9, 1))
        between = gradients_of(pipe.modules)
        pipe.forward_backward(*make_batch(9, 0))
        return before, between, gradients_of(pipe.modules)


def test_a_batch_that_fails_adds_nothing() -> None:
    """And takes nothing of what earlier ones left."""
    ((before, between, after),) = launch_local(fail_in_the_middle, 1, backend="threads")
    for key, gradient in before.items():
        assert torch.equal(between[key], gradient)
        assert torch.equal(after[key], 2 * gradient)
