"""The pipeline as a trainer holds it: what its steps return and leave, and what it refuses."""

import re
from typing import Any

import pytest
import torch
from modules import Stages
from plain import Block, make_batch, make_stage, momentum, squared_error
from shapes import synchronous_names
from torch import Tensor, nn
from torch.optim import lr_scheduler

from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.schedules import Program, Schedule, ScheduleError, create


def losses(context: RankContext, schedule: Schedule, share_loss: bool) -> list[Any]:
    with Pipeline(
        make_stage,
        schedule=schedule,
        loss_fn=squared_error,
        optimizer=momentum,
        transport=context.transport,
        share_loss=share_loss,
    ) as pipe:
        batch = make_batch(9, 0)
        given = [pipe.eval_step(*batch), pipe.train_step(*batch), pipe.forward_backward(*batch)]
        assert not any(loss.requires_grad for loss in given if loss is not None)
        return given


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "dualpipev", "dualpipe"])
@pytest.mark.parametrize("share_loss", [False, True])
def test_the_loss_is_given_where_the_last_stage_lives(name: str, share_loss: bool) -> None:
    """A detached number: the whole batch's; None elsewhere, unless it is shared."""
    schedule = create(name, num_ranks=2, num_microbatches=4)
    owners = schedule.placement.replicas_of(schedule.num_stages - 1)
    model = nn.Sequential(*map(make_stage, range(schedule.num_stages)))
    x, y = make_batch(9, 0)
    expected = squared_error(model(x), y).detach()
    for rank, given in enumerate(launch_local(losses, 2, backend="threads", args=(schedule, share_loss))):
        if rank not in owners and not share_loss:
            assert given == [None, None, None]
            continue
        for loss in given[:2]:
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        assert given[2] < expected, "one update was made in between"


def gradients_of_two(context: RankContext, schedule: Schedule) -> list[tuple[Tensor, Tensor]]:
    with Pipeline(make_stage, schedule=schedule, loss_fn=squared_error, transport=context.transport) as pipe:
        parameters = [parameter for module in pipe.modules.values() for parameter in module.parameters()]
        pipe.forward_backward(*make_batch(9, 0))
        once = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        pipe.forward_backward(*make_batch(9, 0))
        return list(zip(once, [parameter.grad for parameter in parameters if parameter.grad is not None], strict=True))


@pytest.mark.parametrize("name", synchronous_names())
def test_two_batches_add_up_to_exactly_twice_the_gradient(name: str) -> None:
    schedule = create(name, num_ranks=2, num_microbatches=4)
    for pairs in launch_local(gradients_of_two, 2, backend="threads", args=(schedule,)):
        assert pairs
        for once, twice in pairs:
            torch.testing.assert_close(twice, 2 * once, rtol=1e-12, atol=1e-12)


def test_a_step_after_accumulated_batches_uses_them_all() -> None:
    """``forward_backward`` and then ``train_step``: one update from the gradients of both batches."""
    ours, theirs = make_stage(0), make_stage(0)
    with Pipeline({0: ours}, num_microbatches=3, loss_fn=squared_error, optimizer=momentum) as pipe:
        pipe.forward_backward(*make_batch(9, 0))
        pipe.train_step(*make_batch(9, 1))
    optimizer = momentum(theirs.parameters())
    for step in range(2):
        x, y = make_batch(9, step)
        squared_error(theirs(x), y).backward()
    optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert one.grad is None, "gradients are dropped after the update"


def test_a_trainer_may_clip_and_step_by_itself() -> None:
    ours, theirs = make_stage(0), make_stage(0)
    with Pipeline({0: ours}, schedule="zb-h1", num_microbatches=3, loss_fn=squared_error) as pipe:
        assert pipe.optimizer is None
        for module, backward in (
            (ours, pipe.forward_backward),
            (theirs, lambda x, y: squared_error(theirs(x), y).backward()),
        ):
            optimizer = momentum(module.parameters())
            for step in range(3):
                optimizer.zero_grad()
                backward(*make_batch(9, step))
                nn.utils.clip_grad_norm_(module.parameters(), 0.1)
                optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_it_trains_inside_no_grad() -> None:
    """A step means gradients, whatever mode the caller is in."""
    module = make_stage(0)
    with torch.no_grad(), Pipeline({0: module}, num_microbatches=2, loss_fn=squared_error) as pipe:
        pipe.forward_backward(*make_batch(4, 0))
        assert not torch.is_grad_enabled()
    assert all(parameter.grad is not None for parameter in module.parameters())


class Norm(nn.Module):
    """The loss of a stage that sees no target: its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def without_target(output: Tensor, target: None) -> Tensor:
    assert target is None
    return (output**2).mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_rows_count_without_a_target_too(schedule: str) -> None:
    """9 rows over 4 microbatches: the mean of the batch is not the mean of the microbatches' means."""
    ours, theirs = Stages(Norm)(0), Stages(Norm)(0)
    x, _ = make_batch(9, 0)
    with Pipeline({0: ours}, schedule=schedule, num_microbatches=4, loss_fn=without_target) as pipe:
        loss = pipe.forward_backward(x)
    expected = without_target(theirs(x), None)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    for one, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def forward_backward_from_the_first_rank_alone(context: RankContext, rows: int) -> None:
    pipe = Pipeline(Stages(Norm), num_microbatches=4, loss_fn=without_target, transport=context.transport)
    pipe.forward_backward(make_batch(rows, 0)[0] if context.rank == 0 else None)


def test_uneven_rows_that_nobody_can_count_are_refused() -> None:
    launch_local(forward_backward_from_the_first_rank_alone, 2, backend="threads", args=(8,))
    with pytest.raises(ValueError, match="microbatches of 3 and 2 rows do not count alike.* give x on the rank"):
        launch_local(forward_backward_from_the_first_rank_alone, 2, backend="threads", args=(9,))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_microbatches": None}, ValueError, "a schedule by name needs a shape: give num_microbatches beside"),
        ({"schedule": "1f1c"}, ScheduleError, "there is no schedule '1f1c'; did you mean"),
        ({"num_microbatches": 0}, ScheduleError, "num_microbatches is a whole number from 1 up: got 0"),
        ({"num_waves": 2}, ScheduleError, "1f1b has no option 'num_waves'"),
        ({"schedule": "dualpipe"}, ScheduleError, "dualpipe needs"),
        ({"schedule": "seq1f1b"}, ScheduleError, "the engine cannot run seq1f1b: "),
        (
            {"schedule": create("gpipe", num_ranks=2, num_microbatches=2), "num_microbatches": None},
            ScheduleError,
            "the schedule is for 2 ranks, but the transport connects 1",
        ),
        (
            {"schedule": create("gpipe", num_ranks=1, num_microbatches=2)},
            ValueError,
            "the schedule has 2 microbatches, not num_microbatches=3",
        ),
        (
            {"schedule": create("gpipe", num_ranks=1, num_microbatches=3), "num_chunks": 1},
            ValueError,
            "a GPipe has its options already: ['num_chunks'] belong to it",
        ),
        (
            {"schedule": Program.from_csv("0F0,0B0,0F1,0F2,0B2"), "num_microbatches": None},
            ScheduleError,
            "0B1",
        ),
        ({"build_stage": {1: make_stage(1)}}, ValueError, "this rank owns stage 0: the dict of modules has only [1]"),
        (
            {"build_stage": lambda stage: "no module"},
            TypeError,
            "build_stage gave str for stage 0",
        ),
        (
            {"recompute": "half"},
            ValueError,
            "or the number of last microbatches to keep: got 'half'",
        ),
        (
            {"recompute": -1},
            ValueError,
            "or the number of last microbatches to keep: got -1",
        ),
        (
            {"recompute": True},
            ValueError,
            "or the number of last microbatches to keep: got True",
        ),
        (
            {"recompute": {0: "all"}},
            ValueError,
            "or the number of last microbatches to keep: got 'all'",
        ),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    options: dict[str, Any] = {"build_stage": make_stage, "num_microbatches": 3, "loss_fn": squared_error, **arguments}
    with pytest.raises(error, match=re.escape(message)):
        Pipeline(**options)


@pytest.mark.parametrize(
    ("x", "y", "error", "message"),
    [
        (None, torch.ones(3, 6), ValueError, "rank 0 owns the first stage, so it needs the batch's input x: got None"),
        (
            torch.ones(2, 6),
            torch.ones(3, 6),
            ValueError,
            "x has 2 rows for 3 microbatches; give a larger batch",
        ),
        (torch.ones(3, 6), torch.ones(2, 6), ValueError, "y has 2 rows for 3 microbatches"),
        ("text", torch.ones(3, 6), TypeError, "x is made of tensors, tuples, lists, dicts and None: it holds a str"),
    ],
)
@pytest.mark.parametrize("method", ["train_step", "forward_backward", "eval_step"])
def test_batches_that_cannot_be(method: str, x: Any, y: Any, error: type[Exception], message: str) -> None:
    with Pipeline({0: Block(6)}, num_microbatches=3, loss_fn=squared_error, optimizer=momentum) as pipe:
        with pytest.raises(error, match=re.escape(message)):
            getattr(pipe, method)(x, y)
        assert pipe.num_steps == 0


@pytest.mark.parametrize(("loss", "got"), [(lambda o, t: o, "a tensor of shape (1, 6)"), (lambda o, t: 1.0, "float")])
def test_losses_that_cannot_be(loss: Any, got: str) -> None:
    pipe = Pipeline({0: Block(6)}, num_microbatches=3, loss_fn=loss, optimizer=momentum)
    with pytest.raises(TypeError, match=re.escape(got)):
        pipe.train_step(torch.ones(3, 6), torch.ones(3, 6))


def test_training_needs_a_loss_and_prediction_does_not() -> None:
    with Pipeline({0: make_stage(0)}, num_microbatches=3, optimizer=momentum) as pipe:
        assert pipe.predict(make_batch(3, 0)[0]).shape == (3, 6)
        with pytest.raises(ValueError, match="training and evaluation need a loss: give the Pipeline a loss_fn"):
            pipe.train_step(*make_batch(3, 0))


def test_an_update_needs_an_optimizer() -> None:
    with Pipeline({0: make_stage(0)}, num_microbatches=3, loss_fn=squared_error) as pipe:
        with pytest.raises(ValueError, match="give the Pipeline an optimizer, or call forward_backward"):
            pipe.train_step(*make_batch(3, 0))
        assert pipe.forward_backward(*make_batch(3, 0)) is not None


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 1),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, float),
    ],
)
def test_an_optimizer_without_parameters_is_no_error(scheduler: Any) -> None:
    """Nor is a learning rate scheduler, which every rank steps alike."""
    with Pipeline({0: nn.Identity()}, num_microbatches=3, loss_fn=squared_error, optimizer=momentum) as pipe:
        rates = scheduler(pipe.optimizer)
        for step in range(2):
            x, y = make_batch(3, step)
            torch.testing.assert_close(pipe.train_step(x, y), squared_error(x, y))
            rates.step()
        pipe.load_state_dict(pipe.state_dict())
