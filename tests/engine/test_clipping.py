"""Clipping: by the norm of all stages' gradients together, each weight counted once, as torch does in one process."""

from typing import Any

import pytest
import torch
from meanings import (
    ALL,
    ONE_COPY,
    Named,
    assert_close,
    assert_same,
    gradients_of,
    on_threads,
    train,
    train_plainly,
    under,
)
from plain import make_batch, make_stage, squared_error
from tied import TIED, Build, make_text, mean_over_tokens, sum_and_count
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext
from stagewright.schedules import Schedule, create

BATCHES = [make_text(9, step) for step in range(5)]


@under(ALL)
@pytest.mark.parametrize("max_norm", [0.2, 1e6])
def test_max_norm_clips_and_reports_the_norm_of_the_plain_model(schedule: Schedule, max_norm: float) -> None:
    """The tied and the replicated weights counted once; where nothing has to be clipped, nothing is."""
    build = Build(schedule.num_stages)
    options = {"build_stage": build, "loss_fn": sum_and_count, "tied": TIED, "max_norm": max_norm}
    results = on_threads(train, schedule, BATCHES, options)
    tied = Build(schedule.num_stages, tie=True)
    plain = train_plainly(schedule.num_stages, BATCHES, mean_over_tokens, build_stage=tied, max_norm=max_norm)
    assert_same(results, plain)
    for result in results:
        assert result.norms == pytest.approx(plain.norms, rel=1e-12, abs=0)
        assert result.norms == results[0].norms  # to the last bit


def clip_own(context: RankContext, schedule: Schedule, max_norm: float) -> tuple[float, Named, float | None]:
    with Pipeline(
        Build(schedule.num_stages), schedule=schedule, loss_fn=sum_and_count, transport=context.transport, tied=TIED
    ) as pipe:
        assert pipe.grad_norm is None
        pipe.forward_backward(*BATCHES[0])
        norm = pipe.clip_grad_norm_(max_norm)
        return norm, gradients_of(pipe.modules), pipe.grad_norm


@under(ALL)
@pytest.mark.parametrize("max_norm", [0.2, 1e6])
def test_clip_grad_norm_between_backward_and_the_trainers_own_step(schedule: Schedule, max_norm: float) -> None:
    results = on_threads(clip_own, schedule, max_norm)
    build = Build(schedule.num_stages, tie=True)
    modules = {stage: build(stage) for stage in range(schedule.num_stages)}
    model = nn.Sequential(*modules.values())
    x, y = BATCHES[0]
    mean_over_tokens(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
    assert (norm > max_norm) == (max_norm == 0.2)
    for own, _, reported in results:
        assert own == pytest.approx(norm, rel=1e-12, abs=0)
        assert reported == own
    assert_close([gradients for _, gradients, _ in results], gradients_of(modules))


def spread_out(stage: int) -> nn.Module:
    """Parameters of several types: the norm is that of all of them."""
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, dtype=torch.bfloat16), nn.Linear(6, 6))
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * stage + index)))
    return _Casting(module)


class _Casting(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.layers
        return third(second(first(x).bfloat16()).float())


@under([schedule for schedule in ALL if schedule.name in ("1f1b", "zb-h1", "dualpipe")])
def test_the_norm_is_added_up_in_double_precision(schedule: Schedule) -> None:
    """It is as exact as the gradients that it is of, of whatever type."""
    options = {"build_stage": spread_out, "max_norm": 0.1}
    batches = [tuple(tensor.float() for tensor in make_batch(9, step)) for step in range(2)]
    results = on_threads(train_and_measure, schedule, batches, options)
    square = sum((gradient.double() ** 2).sum().item() for _, gradient in merged(results).items())
    for norm, _ in results:
        assert norm == pytest.approx(square**0.5, rel=1e-12)


def train_and_measure(
    context: RankContext, schedule: Schedule, batches: Any, options: dict[str, Any]
) -> tuple[float | None, Named]:
    """The norm that an update reports, and the gradients that it is of."""
    build, max_norm = options["build_stage"], options["max_norm"]
    with Pipeline(build, schedule=schedule, loss_fn=squared_error, transport=context.transport) as pipe:
        pipe.forward_backward(*batches[0])
        gradients = gradients_of(pipe.modules)
        return pipe.clip_grad_norm_(max_norm), gradients


def merged(results: list[tuple[float | None, Named]]) -> Named:
    return {key: gradient for _, gradients in results for key, gradient in gradients.items()}


class Sparse(nn.Module):
    """An embedding whose gradient may be a sparse tensor, with rows that occur more than once."""

    def __init__(self, stage: int, *, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, sparse=sparse, dtype=torch.float64)
        with torch.no_grad():
            self.embedding.weight.copy_(torch.arange(66).reshape(11, 6) / 40 - 0.8)
        self.block = make_stage(stage)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embedding(tokens).mean(1))


class BuildSparse:
    """stage -> module."""

    def __init__(self, *, sparse: bool) -> None:
        self._sparse = sparse

    def __call__(self, stage: int) -> nn.Module:
        return Sparse(stage, sparse=self._sparse) if stage == 0 else make_stage(stage)


@under(ONE_COPY)
def test_sparse_gradients_are_clipped_too(schedule: Schedule) -> None:
    """In torch they are not, so the plain loop has dense ones."""
    batches = [(make_text(9, step)[0], make_batch(9, step)[1]) for step in range(4)]
    options = {"build_stage": BuildSparse(sparse=True), "max_norm": 0.3, "optimizer": plain_sgd}
    results = on_threads(train, schedule, batches, options)
    dense = BuildSparse(sparse=False)
    plain = train_plainly(4, batches, build_stage=dense, optimizer=plain_sgd, max_norm=0.3)
    for result in results:
        assert result.norms == pytest.approx(plain.norms, rel=1e-12, abs=0)
    assert_close([result.weights for result in results], plain.weights)


def plain_sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_a_norm_that_cannot_be_is_refused(max_norm: float) -> None:
    schedule = create("1f1b", num_ranks=2, num_microbatches=4)
    with pytest.raises(ValueError, match="max_norm is a number of 0 or more: got"):
        on_threads(train, schedule, [make_batch(9, 0)], {"max_norm": max_norm})
