"""Tied weights: one weight on several stages, wherever those lie; the copies stay bit-equal."""

from typing import Any

import pytest
import torch
from meanings import ALL, Trained, assert_same, on_threads, train, train_plainly, under
from plain import Block, make_stage
from tied import NUM_TOKENS, TIED, WIDTH, Build, First, Last, make_text, mean_over_tokens, sum_and_count
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.schedules import Schedule, create

BATCHES = [make_text(9, step) for step in range(6)]


def adam(named: Any) -> torch.optim.Optimizer:
    """Makes of a gradient that is wrong by a factor an update that is nearly right: so the updates are many."""
    return torch.optim.Adam(named, lr=0.02)


def assert_copies_equal(results: list[Trained], num_stages: int) -> None:
    tables = [
        tensor
        for result in results
        for (stage, name), tensor in result.weights.items()
        if (stage, name) in ((0, "embedding.weight"), (num_stages - 1, "head.weight"))
    ]
    assert len(tables) >= 2
    for table in tables:
        assert torch.equal(table, tables[0])


@under(ALL)
def test_tied_by_one_line(schedule: Schedule) -> None:
    """Embedding and head on two ranks, or on one in a V, or both on both end ranks: as one weight in one process."""
    options = {"build_stage": Build(schedule.num_stages), "loss_fn": sum_and_count, "optimizer": adam, "tied": TIED}
    results = on_threads(train, schedule, BATCHES, options)
    tied = Build(schedule.num_stages, tie=True)
    assert_same(results, train_plainly(schedule.num_stages, BATCHES, mean_over_tokens, adam, tied))
    assert_copies_equal(results, schedule.num_stages)


class Whole(nn.Module):
    """The model as a single stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = First()
        self.last = Last()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.first(tokens))


@pytest.mark.parametrize("tie_by_hand", [False, True])
def test_tied_within_one_stage(tie_by_hand: bool) -> None:
    """The line that ties two stages ties one too: a model need not know how many ranks there are."""
    schedule = create("none", num_ranks=1, num_microbatches=4)
    whole = Whole()
    if tie_by_hand:
        whole.last.head.weight = whole.first.embedding.weight
    options = {
        "build_stage": {0: whole},
        "loss_fn": sum_and_count,
        "optimizer": adam,
        "tied": [["first.embedding.weight", "last.head.weight"]],
    }
    (result,) = on_threads(train, schedule, BATCHES, options)
    plain = train_plainly(2, BATCHES, mean_over_tokens, adam, Build(2, tie=True))
    assert whole.last.head.weight is whole.first.embedding.weight
    for name in ("embedding.weight", "block.widen.weight"):
        torch.testing.assert_close(result.weights[0, f"first.{name}"], plain.weights[0, name], rtol=1e-12, atol=1e-12)
    assert [loss.item() for loss in result.losses] == pytest.approx([loss.item() for loss in plain.losses], rel=1e-12)


IN_ONE_PIECE = [schedule for schedule in ALL if len(schedule.placement.stages_of(0)) > 1]


def train_in_one_piece(context: RankContext, schedule: Schedule, tied: list[list[str]]) -> Trained:
    """Every rank builds the whole model, with one parameter in two places, and takes its own stages out of it."""
    build = Build(schedule.num_stages, tie=True)
    model = {stage: build(stage) for stage in range(schedule.num_stages)}
    options = {"build_stage": model, "loss_fn": sum_and_count, "optimizer": adam, "tied": tied}
    return train(context, schedule, BATCHES, options)


@under(IN_ONE_PIECE)
def test_stages_of_a_rank_that_share_a_parameter_get_copies_that_are_tied(schedule: Schedule) -> None:
    results = on_threads(train_in_one_piece, schedule, TIED)
    tied = Build(schedule.num_stages, tie=True)
    assert_same(results, train_plainly(schedule.num_stages, BATCHES, mean_over_tokens, adam, tied))
    assert_copies_equal(results, schedule.num_stages)


@under([schedule for schedule in IN_ONE_PIECE if schedule.num_stages - 1 in schedule.placement.stages_of(0)])
def test_stages_that_share_a_parameter_undeclared_are_refused(schedule: Schedule) -> None:
    """On as many ranks as there are stages it would not be shared."""
    message = r"share a parameter, 'embedding.weight' there and 'head.weight' here, .* tied=\[\['embedding.weight', 'h"
    with pytest.raises(ValueError, match=message):
        on_threads(train_in_one_piece, schedule, [])


class Twice(nn.Module):
    """A stage of the same kind as all others: its parameters have the names that theirs have."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.block = make_stage(stage)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class TwiceTied:
    """For the plain loop: stages 0 and 2 share one layer."""

    def __init__(self) -> None:
        self._first = Twice(0)

    def __call__(self, stage: int) -> nn.Module:
        if stage == 0:
            return self._first
        module = Twice(stage)
        if stage == 2:
            assert isinstance(module.block, Block)
            assert isinstance(self._first.block, Block)
            module.block.twice.weight = self._first.block.twice.weight
        return module


@under([schedule for schedule in ALL if schedule.num_stages == 4])
def test_a_name_with_its_stage_in_front_is_that_of_one_stage(schedule: Schedule) -> None:
    batches = [(torch.randn(9, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)) for _ in range(4)]
    tied = [["stage0.block.twice.weight", "stage2.block.twice.weight"]]
    results = on_threads(train, schedule, batches, {"build_stage": Twice, "tied": tied})
    assert_same(results, train_plainly(4, batches, build_stage=TwiceTied()))


class Frozen(Build):
    """The ends are frozen; or one of them is."""

    def __init__(self, num_stages: int, *stages: int) -> None:
        super().__init__(num_stages)
        self._frozen = stages

    def __call__(self, stage: int) -> nn.Module:
        module = super().__call__(stage)
        if stage in self._frozen:
            name = "embedding" if stage == 0 else "head"
            getattr(module, name).weight.requires_grad_(False)
        return module


@under(ALL)
def test_a_frozen_tied_weight_has_one_value(schedule: Schedule) -> None:
    last = schedule.num_stages - 1
    options = {"build_stage": Frozen(last + 1, 0, last), "loss_fn": sum_and_count, "tied": TIED}
    results = on_threads(train, schedule, BATCHES[:3], options)
    assert_copies_equal(results, last + 1)
    tables = [result.weights[0, "embedding.weight"] for result in results if (0, "embedding.weight") in result.weights]
    assert torch.equal(tables[0], First().embedding.weight)


def mixed_whole(stage: int) -> nn.Module:
    """Its head is frozen."""
    module = Whole()
    module.last.head.weight.requires_grad_(False)
    return module


class Narrow(Build):
    """The head is a row shorter than the embedding."""

    def __call__(self, stage: int) -> nn.Module:
        module = super().__call__(stage)
        if isinstance(module, Last):
            module.head = nn.Linear(WIDTH, NUM_TOKENS - 1, bias=False, dtype=torch.float64)
        return module


@pytest.mark.parametrize(
    ("build", "tied", "message"),
    [
        (Build(2), [["embedding.weight", "heads.weight"]], "no stage has a parameter 'heads.weight'"),
        (Build(2), [["stage1.embedding.weight", "head.weight"]], "no stage has a parameter 'stage1.embedding.weight'"),
        (Build(2), [*TIED, ["head.weight"]], "'head.weight' is there twice"),
        (
            Narrow(2),
            TIED,
            r"embedding.weight of stage 0: trained float64\[11, 6\], head.weight of stage 1: trained float64\[10, 6\]",
        ),
        (Frozen(2, 0), TIED, r"embedding.weight of stage 0: frozen float64.*, head.weight of stage 1: trained float64"),
        (
            mixed_whole,
            [["first.embedding.weight", "last.head.weight"]],
            r"first.embedding.weight of stage .: trained float64\[11, 6\], last.head.weight of stage .: frozen float64",
        ),
    ],
)
def test_what_cannot_be_tied_is_refused_when_built(build: Any, tied: Any, message: str) -> None:
    schedule = create("1f1b", num_ranks=2, num_microbatches=4)
    with pytest.raises(ValueError, match=message):
        launch_local(make_only, 2, backend="threads", args=(schedule, build, tied))


def make_only(context: RankContext, schedule: Schedule, build: Any, tied: Any) -> None:
    Pipeline(build, schedule=schedule, transport=context.transport, tied=tied).close()
