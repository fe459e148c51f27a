"""What trainers mean must mean the same under every schedule: these stand for all, with a way to run on each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pytest
import torch
from plain import make_batch, make_stage, momentum, squared_error
from shapes import label
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.schedules import Schedule, create

# A rank's tensors by (stage, name).
Named: TypeAlias = Mapping[tuple[int, str], Tensor]

# All with four stages and four microbatches, so that one plain loop serves them.
ONE_COPY: Final = (
    create("gpipe", num_ranks=4, num_microbatches=4),
    create("1f1b", num_ranks=4, num_microbatches=4),
    create("interleaved", num_ranks=2, num_microbatches=4, num_chunks=2),
    create("zb-h1", num_ranks=4, num_microbatches=4),
    create("zbv", num_ranks=2, num_microbatches=4),
    create("dualpipev", num_ranks=2, num_microbatches=4),
)
# Every stage on two ranks; as many microbatches, and two or four stages.
TWO_COPIES: Final = (
    create("dualpipe", num_ranks=2, num_microbatches=4),
    create("chimera", num_ranks=4, num_microbatches=4),
)
ALL: Final = ONE_COPY + TWO_COPIES
SPLITTING: Final = tuple(schedule for schedule in ALL if schedule.name in ("zb-h1", "zbv", "dualpipev", "dualpipe"))
# Does not divide by the microbatches: their rows are 3, 2, 2 and 2.
ROWS: Final = 9


def under(schedules: Sequence[Schedule]) -> pytest.MarkDecorator:
    """A test case a schedule."""
    return pytest.mark.parametrize("schedule", schedules, ids=label)


def on_threads(function: Callable[..., Any], schedule: Schedule, *args: Any) -> list[Any]:
    """Run ``function(context, schedule, *args)`` in a thread a rank."""
    return launch_local(function, schedule.num_ranks, backend="threads", args=(schedule, *args))


def weights_of(modules: Mapping[int, nn.Module]) -> Named:
    """Copies of all parameters of some stages."""
    return {
        (stage, name): parameter.detach().clone()
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
    }


def buffers_of(modules: Mapping[int, nn.Module]) -> Named:
    """Copies of all buffers of some stages."""
    return {
        (stage, name): buffer.detach().clone()
        for stage, module in modules.items()
        for name, buffer in module.named_buffers()
    }


def gradients_of(modules: Mapping[int, nn.Module]) -> Named:
    """Copies of all gradients of some stages."""
    return {
        (stage, name): parameter.grad.clone()
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def together(of_ranks: Sequence[Named]) -> Named:
    """The tensors of all ranks; what several of them have must be the same to the last bit."""
    found: dict[tuple[int, str], Tensor] = {}
    for of_rank in of_ranks:
        for key, tensor in of_rank.items():
            assert torch.equal(found.setdefault(key, tensor), tensor), f"copies of {key} differ"
    return found


def assert_close(of_ranks: Sequence[Named], plain: Named, tolerance: float = 1e-12) -> None:
    """All ranks together have what the plain loop has."""
    found = together(of_ranks)
    assert set(found) == set(plain)
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, plain[key], rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}")


@dataclass
class Trained:
    """What a training leaves.

    Of each step the loss, metrics and norm; weights and buffers after the last, and the gradients of one more batch.
    """

    losses: list[Tensor | None] = field(default_factory=list)
    metrics: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    weights: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    gradients: Named = field(default_factory=dict)


def train(context: RankContext, schedule: Schedule, batches: Sequence[Any], options: Mapping[str, Any]) -> Trained:
    """One rank: an update with each batch but the last, and the gradients of that one."""
    torch.set_num_threads(1)
    result = Trained()
    options = {"build_stage": make_stage, "loss_fn": squared_error, "optimizer": momentum, **options}
    with Pipeline(schedule=schedule, transport=context.transport, **options) as pipe:
        for x, y in batches[:-1]:
            result.losses.append(pipe.train_step(x, y))
            result.metrics.append(pipe.metrics)
            result.norms.append(pipe.grad_norm)
        result.weights = weights_of(pipe.modules)
        result.buffers = buffers_of(pipe.modules)
        pipe.forward_backward(*batches[-1])
        result.gradients = gradients_of(pipe.modules)
    return result


def train_all(context: RankContext, cases: Sequence[tuple[Schedule, Sequence[Any], dict[str, Any]]]) -> list[Trained]:
    """Several trainings one after the other."""
    return [train(context, *case) for case in cases]


def train_plainly(
    num_stages: int,
    batches: Sequence[Any],
    loss: Callable[[Any, Any], Tensor] = squared_error,
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum,
    build_stage: Callable[[int], nn.Module] = make_stage,
    max_norm: float | None = None,
) -> Trained:
    """The same in one process, on whole batches."""
    modules = {stage: build_stage(stage) for stage in range(num_stages)}
    model = nn.Sequential(*modules.values())
    # As a training script would: whatever is frozen is left out, and one weight is trained once.
    steps = optimizer([(name, weight) for name, weight in model.named_parameters() if weight.requires_grad])
    result = Trained()
    for x, y in batches[:-1]:
        steps.zero_grad()
        batch_loss = loss(model(x), y)
        batch_loss.backward()
        result.losses.append(batch_loss.detach())
        if max_norm is not None:
            result.norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        steps.step()
    model.zero_grad()
    result.weights = weights_of(modules)
    x, y = batches[-1]
    loss(model(x), y).backward()
    result.gradients = gradients_of(modules)
    return result


def assert_same(results: Sequence[Trained], plain: Trained, tolerance: float = 1e-12) -> None:
    """Losses, weights and gradients are those of the plain loop."""
    given = [result.losses for result in results if result.losses[0] is not None]
    assert given
    for losses in given:
        torch.testing.assert_close(
            torch.stack(losses), torch.stack(plain.losses), rtol=tolerance, atol=tolerance, check_dtype=False
        )
    assert_close([result.weights for result in results], plain.weights, tolerance)
    assert_close([result.gradients for result in results], plain.gradients, tolerance)


def make_float_stage(stage: int) -> nn.Module:
    """The stages of ``plain`` in float32."""
    return make_stage(stage).float()


def make_batches(num: int, rows: int = ROWS) -> list[tuple[Tensor, Tensor]]:
    """Some batches of ``plain``."""
    return [make_batch(rows, step) for step in range(num)]
