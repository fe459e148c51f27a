"""Losses: means over rows or over tokens, with metrics beside them, as of the whole batch in one process."""

from typing import Any

import pytest
import torch
from counting import CountingTransport, on_counting_threads
from meanings import ALL, ONE_COPY, ROWS, assert_same, make_batches, on_threads, train, train_plainly, under
from plain import make_batch, make_stage, squared_error
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.schedules import Schedule, create

Masked = dict[str, Tensor]


def masked_batches(num: int, rows: int = ROWS) -> list[tuple[Tensor, Masked]]:
    """Targets of which a mask says what counts; in the second microbatch, rows 3 and 4, nothing does."""
    batches = []
    for x, y in make_batches(num, rows):
        mask = (y > -0.3).double()
        mask[3:5] = 0
        batches.append((x, {"y": y, "mask": mask}))
    return batches


def masked_sum(output: Tensor, target: Masked) -> tuple[Tensor, Tensor]:
    """(sum, count)"""
    return ((output - target["y"]) ** 2 * target["mask"]).sum(), target["mask"].sum()


def masked_sum_with_metrics(output: Tensor, target: Masked) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The metric is no number over a microbatch without anything that counts."""
    total, count = masked_sum(output, target)
    return total, count, {"error": ((output - target["y"]).abs() * target["mask"]).sum() / count}


def masked_mean(output: Tensor, target: Masked) -> Tensor:
    """What the plain loop trains on."""
    total, count = masked_sum(output, target)
    return total / count


@under(ALL)
def test_sum_and_count_give_the_mean_over_tokens(schedule: Schedule) -> None:
    """Also where a microbatch has none at all."""
    batches = masked_batches(4)
    results = on_threads(train, schedule, batches, {"loss_fn": masked_sum})
    assert_same(results, train_plainly(schedule.num_stages, batches, masked_mean))


@under(ALL)
def test_a_batch_without_tokens_has_no_gradient_and_is_a_number(schedule: Schedule) -> None:
    x, y = masked_batches(1)[0]
    nothing = {"y": y["y"], "mask": torch.zeros_like(y["mask"])}
    for result in on_threads(train, schedule, [(x, nothing), (x, nothing)], {"loss_fn": masked_sum_with_metrics}):
        assert result.losses in ([None], [0.0])
        assert all(torch.isfinite(value) for value in result.metrics[0].values())
        for key, weight in result.weights.items():
            assert torch.equal(weight, dict(make_stage(key[0]).named_parameters())[key[1]])
            assert not result.gradients[key].any()


@under(ALL)
@pytest.mark.parametrize("share_loss", [False, True])
def test_losses_and_metrics_are_true_where_they_are_given(schedule: Schedule, share_loss: bool) -> None:
    """Without a graph; and where they are not given, there is none, not a wrong one."""
    batches = masked_batches(3)
    options = {"loss_fn": masked_sum_with_metrics, "share_loss": share_loss}
    plain = train_plainly(schedule.num_stages, batches, masked_mean)
    results = on_threads(train, schedule, batches, options)
    owners = schedule.placement.replicas_of(schedule.num_stages - 1)
    for rank, result in enumerate(results):
        if rank not in owners and not share_loss:
            assert result.losses == [None, None]
            assert result.metrics == [{}, {}]
            continue
        for loss, expected, metrics in zip(result.losses, plain.losses, result.metrics):
            assert loss is not None
            assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
            assert loss.shape == ()
            for value in (loss, *metrics.values()):
                assert not value.requires_grad
                assert value.grad_fn is None
            assert set(metrics) == {"error"}
        if share_loss:
            assert [loss.item() for loss in result.losses] == [loss.item() for loss in results[0].losses]
            assert [metrics["error"].item() for metrics in result.metrics] == [
                metrics["error"].item() for metrics in results[0].metrics
            ]


def mean_with_metrics(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """A mean over rows, with metrics that are means over rows too: a tensor and a number."""
    error = (output - target).abs().mean()
    return squared_error(output, target), {"error": error, "rounded": round(error.item(), 3)}


@under(ALL)
def test_metrics_beside_a_mean_count_by_rows(schedule: Schedule) -> None:
    """Nine rows in four microbatches: the mean over microbatches would be another one."""
    model = nn.Sequential(*[make_stage(stage) for stage in range(schedule.num_stages)])
    x, y = make_batch(ROWS, 0)
    output = model(x)
    parts = zip(output.tensor_split(4), y.tensor_split(4))
    rounded = sum(mean_with_metrics(*part)[1]["rounded"] * len(part[0]) for part in parts) / ROWS
    options = {"loss_fn": mean_with_metrics, "share_loss": True}
    for result in on_threads(train, schedule, [(x, y), (x, y)], options):
        assert result.metrics[0]["error"].item() == pytest.approx((output - y).abs().mean().item(), rel=1e-12)
        assert result.metrics[0]["rounded"].item() == pytest.approx(rounded, rel=1e-12)


def count_messages(context: RankContext, schedule: Schedule, share_loss: bool) -> list[tuple[str, int]]:
    assert isinstance(context.transport, CountingTransport)
    with Pipeline(
        make_stage,
        schedule=schedule,
        loss_fn=mean_with_metrics,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        transport=context.transport,
        share_loss=share_loss,
    ) as pipe:
        pipe.train_step(*make_batch(ROWS, 0))
        context.transport.sent.clear()
        pipe.train_step(*make_batch(ROWS, 0))
        return context.transport.sent


@under(ONE_COPY)
def test_sharing_the_loss_costs_one_small_broadcast(schedule: Schedule) -> None:
    """The last stage's rank sends each other rank one message; nobody else sends anything more than without."""
    counts = []
    for share_loss in (False, True):
        counts.append(on_counting_threads(count_messages, schedule.num_ranks, schedule, share_loss))
    owner = schedule.placement.replicas_of(schedule.num_stages - 1)[0]
    for rank, (without, shared) in enumerate(zip(*counts)):
        assert shared[: len(without)] == without
        further = shared[len(without) :]
        assert len(further) == (schedule.num_ranks - 1 if rank == owner else 0)
        assert all(num_bytes < 200 for _, num_bytes in further)


class Heads(nn.Module):
    """A last stage with several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.block = make_stage(3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.block(x)
        return {"logits": hidden[:, :4], "value": (hidden[:, 4], hidden[:, 5:])}


def build_with_heads(stage: int) -> nn.Module:
    return make_stage(stage) if stage < 3 else Heads()


def loss_of_inputs_and_outputs(output: dict[str, Any], target: tuple[Tensor, Tensor]) -> Tensor:
    """Needs every output, and the batch's input beside the target."""
    x, y = target
    value, rest = output["value"]
    kept = (output["logits"] - y[:, :4]) ** 2
    return kept.mean() + (value * x[:, 0]).mean() + (rest - x[:, 1:2]).abs().mean()


@under([schedule for schedule in ALL if schedule.num_stages == 4])
def test_a_loss_that_needs_the_inputs_or_several_outputs(schedule: Schedule) -> None:
    batches = [(x, (x, y)) for x, y in make_batches(3)]
    options = {"build_stage": build_with_heads, "loss_fn": loss_of_inputs_and_outputs}
    results = on_threads(train, schedule, batches, options)
    assert_same(results, train_plainly(4, batches, loss_of_inputs_and_outputs, build_stage=build_with_heads))


def mixed(output: Tensor, target: Tensor) -> Any:
    """A mean for a microbatch of three rows, (sum, count) for all others."""
    return squared_error(output, target) if len(output) == 3 else (squared_error(output, target), 1)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda output, target: 1.0, "loss_fn returns the mean .* or .sum, count.: got float"),
        (lambda output, target: output, r"loss_fn returns one number, .* got a tensor of shape \(9, 6\)"),
        (lambda output, target: (output.sum(), "9"), "the count of a .sum, count. loss is one number: got str"),
        (lambda output, target: (output.sum(), target), "the count of a .sum, count. loss is one number: got a tensor"),
    ],
)
def test_what_is_no_loss_is_refused(loss_fn: Any, message: str) -> None:
    schedule = create("none", num_ranks=1, num_microbatches=1)
    with pytest.raises(TypeError, match=message):
        launch_local(train, 1, backend="threads", args=(schedule, make_batches(1), {"loss_fn": loss_fn}))


def test_means_and_sums_do_not_mix() -> None:
    schedule = create("1f1b", num_ranks=2, num_microbatches=4)
    with pytest.raises(TypeError, match="either a mean or .sum, count., the same for all microbatches: got both"):
        on_threads(train, schedule, make_batches(2), {"loss_fn": mixed})
