"""Evaluation and prediction: at any time, in any number of microbatches, and training does not notice."""

from typing import Any

import pytest
import torch
from meanings import ALL, ONE_COPY, TWO_COPIES, Named, gradients_of, on_threads, under, weights_of
from plain import make_batch, make_stage, momentum, squared_error
from tied import make_text
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext
from stagewright.schedules import Schedule

# (rows, microbatches): fewer and more than the schedule's, one alone, more than there are ranks.
SIZES = [(9, None), (1, 1), (7, 7), (10, 3), (64, 2), (9, 9)]


def make(context: RankContext, schedule: Schedule, **options: Any) -> Pipeline:
    torch.set_num_threads(1)
    options = {"build_stage": make_stage, "loss_fn": squared_error, "optimizer": momentum, **options}
    return Pipeline(schedule=schedule, transport=context.transport, **options)


def evaluate(context: RankContext, schedule: Schedule) -> list[tuple[Any, Any]]:
    """Before the first training step, several times in a row, and after one."""
    with make(context, schedule) as pipe:
        given = []
        for _ in range(2):
            for rows, num_microbatches in SIZES:
                batch = make_batch(rows, rows)
                loss = pipe.eval_step(*batch, num_microbatches=num_microbatches)
                assert loss is None or not loss.requires_grad
                given.append((loss, pipe.predict(batch[0], num_microbatches=num_microbatches)))
            pipe.train_step(*make_batch(9, 0))
        return given


def evaluate_plainly(num_stages: int) -> list[tuple[float, Tensor]]:
    model = nn.Sequential(*[make_stage(stage) for stage in range(num_stages)])
    optimizer = momentum(model.parameters())
    given = []
    for _ in range(2):
        with torch.no_grad():
            for rows, _ in SIZES:
                x, y = make_batch(rows, rows)
                given.append((squared_error(model(x), y).item(), model(x)))
        optimizer.zero_grad()
        x, y = make_batch(9, 0)
        squared_error(model(x), y).backward()
        optimizer.step()
    return given


@under(ALL)
def test_any_number_of_microbatches_of_any_size_at_any_time(schedule: Schedule) -> None:
    """Outputs in the order of the rows, losses of all rows: where the last stage lives, and nowhere else."""
    results = on_threads(evaluate, schedule)
    plain = evaluate_plainly(schedule.num_stages)
    owners = schedule.placement.replicas_of(schedule.num_stages - 1)
    for rank, given in enumerate(results):
        for (loss, output), (expected, expected_output) in zip(given, plain, strict=True):
            assert (loss is not None) == (rank in owners)
            if loss is not None:
                assert loss.item() == pytest.approx(expected, rel=1e-12)
            if output is not None:
                assert rank in owners
                torch.testing.assert_close(output, expected_output, rtol=1e-12, atol=1e-12)
    for outputs in zip(*[[output for _, output in given] for given in results]):
        assert sum(output is not None for output in outputs) == 1


class Noisy(nn.Module):
    """A stage that draws random numbers, and may remember what it has seen."""

    def __init__(self, stage: int, *, remembers: bool) -> None:
        super().__init__()
        self.block = make_stage(stage)
        self.norm = (nn.BatchNorm1d(6) if remembers else nn.LayerNorm(6)).double()
        self.dropout = nn.Dropout(0.4)
        self.still = nn.Dropout(0.4).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.still(self.dropout(self.norm(self.block(x))))


class Build:
    """stage -> module."""

    def __init__(self, *, remembers: bool) -> None:
        self._remembers = remembers

    def __call__(self, stage: int) -> nn.Module:
        return Noisy(stage, remembers=self._remembers)


def train_between(context: RankContext, schedule: Schedule, build: Build, evaluates: bool) -> tuple[Any, ...]:
    """Accumulate and step, with evaluations in between or without; the caller's random numbers stay his own."""
    with make(context, schedule, build_stage=build, share_loss=True) as pipe:
        losses, state = [], random_state(context)
        for step in range(3):
            for part in range(2):
                if evaluates:
                    evaluate_in_passing(pipe, step)
                losses.append(pipe.forward_backward(*make_batch(9, 2 * step + part)))
            if evaluates:
                evaluate_in_passing(pipe, step)
            losses.append(pipe.train_step(*make_batch(9, 10 + step)))
        pipe.forward_backward(*make_batch(9, 0))
        assert torch.equal(random_state(context), state)
        modes = [module.training for stage in pipe.modules.values() for module in stage.modules()]
        buffers = {
            (stage, name): buffer for stage, module in pipe.modules.items() for name, buffer in module.named_buffers()
        }
        return [loss.item() for loss in losses], weights_of(pipe.modules), gradients_of(pipe.modules), buffers, modes


def random_state(context: RankContext) -> Tensor:
    """Of the generator that all ranks share, while none of them computes."""
    context.transport.gather(b"")
    state = torch.get_rng_state()
    context.transport.gather(b"")
    return state


def evaluate_in_passing(pipe: Pipeline, step: int) -> None:
    before = gradients_of(pipe.modules)
    metrics, norm, steps = pipe.metrics, pipe.grad_norm, pipe.num_steps
    first, second = (pipe.eval_step(*make_batch(7, step), num_microbatches=3) for _ in range(2))
    assert first == second
    pipe.predict(make_batch(5, step)[0], num_microbatches=5)
    after = gradients_of(pipe.modules)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert (metrics, norm, steps) == (pipe.metrics, pipe.grad_norm, pipe.num_steps)


CASES = [(schedule, Build(remembers=True)) for schedule in ONE_COPY]
CASES += [(schedule, Build(remembers=False)) for schedule in TWO_COPIES]


@pytest.mark.parametrize(("schedule", "build"), CASES, ids=[schedule.name for schedule, _ in CASES])
def test_in_between_touches_no_gradient_no_batch_norm_and_no_random_number(schedule: Schedule, build: Build) -> None:
    with_and_without = [on_threads(train_between, schedule, build, evaluates) for evaluates in (True, False)]
    for one, other in zip(*with_and_without):
        losses, *tensors, modes = one
        other_losses, *other_tensors, other_modes = other
        assert losses == other_losses
        assert modes == other_modes
        for named, other_named in zip(tensors, other_tensors):
            assert_equal(named, other_named)
    assert len(set(with_and_without[0][0][0])) == 9  # the masks of no two batches are the same


def assert_equal(one: Named, other: Named) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def evaluate_tokens(context: RankContext, schedule: Schedule) -> Any:
    with make(context, schedule, loss_fn=summed_with_metrics, share_loss=True) as pipe:
        x, y = make_batch(9, 3)
        loss = pipe.eval_step(x, {"y": y, "mask": make_text(9, 3)[1][:, :1] >= 0}, num_microbatches=5)
        assert loss is not None
        return loss.item(), pipe.metrics["largest"].item()


def summed_with_metrics(output: Tensor, target: dict[str, Tensor]) -> Any:
    """(sum, count, metrics); rows 3 and 4 count for nothing, which is microbatch 2 of 5 alone."""
    error = ((output - target["y"]) ** 2).sum(1, keepdim=True)
    kept = error[target["mask"]]
    return kept.sum(), target["mask"].sum(), {"largest": kept.mean()}


@under(ALL)
def test_a_sum_and_count_is_evaluated_over_tokens_too(schedule: Schedule) -> None:
    model = nn.Sequential(*[make_stage(stage) for stage in range(schedule.num_stages)])
    x, y = make_batch(9, 3)
    mask = make_text(9, 3)[1][:, :1] >= 0
    assert 0 < mask.sum() < 7
    total, count, _ = summed_with_metrics(model(x), {"y": y, "mask": mask})
    for loss, metric in on_threads(evaluate_tokens, schedule):
        assert loss == pytest.approx((total / count).item(), rel=1e-12)
        assert metric == pytest.approx((total / count).item(), rel=1e-12)


def ask_too_much(context: RankContext, schedule: Schedule) -> None:
    with make(context, schedule) as pipe:
        pipe.predict(make_batch(3, 0)[0], num_microbatches=4)


@under([ALL[1]])
def test_a_microbatch_has_a_row(schedule: Schedule) -> None:
    with pytest.raises(ValueError, match="x has 3 rows for 4 microbatches; give a larger batch or fewer"):
        on_threads(ask_too_much, schedule)
