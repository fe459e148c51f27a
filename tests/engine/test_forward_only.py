"""``eval_step`` and ``predict`` at any time, of any size, and without a trace."""

from typing import Any

import pytest
import torch
from modules import Stages
from plain import assert_nothing_in_flight, make_batch, make_stage, momentum, squared_error
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.schedules import Schedule, create

SCHEDULES = [
    create("gpipe", num_ranks=3, num_microbatches=4),
    create("zb-h1", num_ranks=2, num_microbatches=4),
    create("interleaved", num_ranks=2, num_microbatches=4, num_chunks=2),
    create("hanayo", num_ranks=2, num_microbatches=4),
    create("dualpipev", num_ranks=2, num_microbatches=4),
    create("dualpipe", num_ranks=2, num_microbatches=4),
    create("chimera", num_ranks=4, num_microbatches=4),
]
SIZES = [(9, None), (1, 1), (5, 3), (12, 12), (9, 4)]


class Noisy(nn.Module):
    """All that behaves otherwise in training: dropout, batch statistics; and a generator that a forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        y: Tensor = self.drop(self.norm(self.linear(x)))
        return y


def whole(num_stages: int) -> nn.Sequential:
    """The model in one piece, in evaluation mode."""
    return nn.Sequential(*(Stages(Noisy)(stage) for stage in range(num_stages))).eval()


def options_of(schedule: Schedule) -> dict[str, Any]:
    """Copies of a stage see different microbatches, so only statistics of whole batches are the same in all."""
    return {"schedule": schedule, "deferred_batch_norm": len(schedule.placement.routes) > 1}


def evaluate(context: RankContext, schedule: Schedule) -> list[tuple[Tensor | None, Any]]:
    with Pipeline(Stages(Noisy), loss_fn=squared_error, transport=context.transport, **options_of(schedule)) as pipe:
        results = []
        for step, (rows, num_microbatches) in enumerate(SIZES):
            x, y = make_batch(rows, step)
            loss = pipe.eval_step(x, y, num_microbatches=num_microbatches)
            results.append((loss, pipe.predict(x, num_microbatches=num_microbatches)))
            assert_nothing_in_flight(pipe)
        return results


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_before_training_back_to_back_with_any_rows_and_microbatches(schedule: Schedule) -> None:
    model = whole(schedule.num_stages)
    last = schedule.placement.replicas_of(schedule.num_stages - 1)
    ranks = launch_local(evaluate, schedule.num_ranks, backend="threads", args=(schedule,))
    for rank, results in enumerate(ranks):
        for step, (loss, output) in enumerate(results):
            x, y = make_batch(SIZES[step][0], step)
            expected = model(x).detach()
            if rank in last:
                torch.testing.assert_close(loss, squared_error(expected, y), rtol=1e-12, atol=1e-12)
            else:
                assert loss is None
            if rank == schedule.placement.rank_of(schedule.num_stages - 1):
                torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def train_between(context: RankContext, schedule: Schedule, evaluates: bool) -> list[Tensor]:
    """Losses, statistics and gradients of a training, with or without evaluations at every moment."""

    def evaluate() -> None:
        if evaluates:
            for step, (rows, num_microbatches) in enumerate(SIZES):
                pipe.eval_step(*make_batch(rows, step), num_microbatches=num_microbatches)
                pipe.predict(make_batch(rows, step)[0], num_microbatches=num_microbatches)

    with Pipeline(
        Stages(Noisy),
        loss_fn=squared_error,
        optimizer=momentum,
        transport=context.transport,
        share_loss=True,
        **options_of(schedule),
    ) as pipe:
        traces: list[Tensor] = []
        evaluate()
        for step in range(2):
            loss = pipe.train_step(*make_batch(9, step))
            assert loss is not None
            traces.append(loss)
            evaluate()
        for step in range(2):
            pipe.forward_backward(*make_batch(9, step))
            evaluate()
        for module in pipe.modules.values():
            traces += [tensor.clone() for tensor in module.state_dict().values()]
            traces += [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            assert all(part.training for part in module.modules())
        return traces


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_training_is_the_same_to_the_bit_with_and_without_evaluations(schedule: Schedule) -> None:
    """So they touch no gradient, no statistic, no random number, no optimizer state and no mode."""
    trainings = [
        launch_local(train_between, schedule.num_ranks, backend="threads", args=(schedule, evaluates))
        for evaluates in (False, True)
    ]
    for without, with_evaluations in zip(*trainings):
        assert len(without) == len(with_evaluations)
        for one, other in zip(without, with_evaluations):
            assert torch.equal(one, other)


def test_random_numbers_of_the_caller_are_left_alone() -> None:
    with Pipeline(Stages(Noisy), num_microbatches=2, loss_fn=squared_error) as pipe:
        batch = make_batch(4, 0)
        before = torch.get_rng_state()
        pipe.eval_step(*batch)
        pipe.predict(batch[0])
        assert torch.equal(torch.get_rng_state(), before)


def test_a_module_in_evaluation_mode_stays_in_it() -> None:
    module = Stages(Noisy)(0)
    module.norm.eval()  # type: ignore[union-attr, operator]
    with Pipeline({0: module}, num_microbatches=2, loss_fn=squared_error) as pipe:
        pipe.eval_step(*make_batch(4, 0))
    assert [part.training for part in module.modules()] == [True, True, False, True]


def test_modes_are_put_back_after_an_error() -> None:
    def fail(output: Tensor, target: Tensor) -> Tensor:
        raise ArithmeticError("no loss today")

    module = Stages(Noisy)(0)
    pipe = Pipeline({0: module}, num_microbatches=2, loss_fn=fail)
    with pytest.raises(ArithmeticError, match="no loss today"):
        pipe.eval_step(*make_batch(4, 0))
    assert all(part.training for part in module.modules())


def test_nothing_is_stashed_and_nothing_holds_a_graph() -> None:
    with Pipeline(make_stage, num_microbatches=3, loss_fn=squared_error) as pipe:
        outputs = pipe.predict(make_batch(6, 0)[0])
        loss = pipe.eval_step(*make_batch(6, 0))
        assert loss is not None
        assert not outputs.requires_grad
        assert not loss.requires_grad
        assert not any(parameter.grad is not None for parameter in pipe.modules[0].parameters())
