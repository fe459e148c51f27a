"""Remedies against staleness do what a plain loop with the same old gradients does, and nothing where none is old."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from launching import launch_on
from plain import make_batch, make_stage, momentum, squared_error
from stale_loop import Rule, Weights, train_rank, train_stale
from torch import Tensor

from stagewright.engine import (
    DiscrepancyCorrection,
    ErrorFeedback,
    LearningRateDiscount,
    Pipeline,
    RankContext,
    WeightPrediction,
    launch_local,
)
from stagewright.engine.staleness import Remedy
from stagewright.engine.updates.extrapolated import ExtrapolatedWeights
from stagewright.engine.updates.treatments import Moving, Treatment
from stagewright.schedules import Schedule, create

NUM_BATCHES = 8
TOLERANCE = 1e-12
REMEDIES = (LearningRateDiscount(5, power=0.8), WeightPrediction(), DiscrepancyCorrection(), ErrorFeedback())


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5)


def name_of(value: Any) -> str:
    return value.__name__ if callable(value) else type(value).__name__


def newest(pipe: Pipeline) -> Weights:
    state = pipe.state_dict()["stages"]
    return {(stage, name): weight.clone() for stage, weights in state.items() for name, weight in weights.items()}


def batch_of(schedule: Schedule, step: int) -> tuple[Tensor, Tensor]:
    return make_batch(2 * schedule.num_microbatches, step)


def run(
    schedule: Schedule, staleness: Any, optimizer: Any, flushed: Sequence[int] = ()
) -> tuple[list[float], dict[Any, Tensor]]:
    """All ranks on threads: the losses, and the weights of all stages."""
    batches = [batch_of(schedule, step) for step in range(NUM_BATCHES)]
    options = {"optimizer": optimizer, "staleness": staleness, "batches": batches}
    results = launch_on("threads", train_rank, schedule.num_ranks, (schedule, flushed, options))
    return results[0][0], {key: weight for _, weights, _ in results for key, weight in weights.items()}


def assert_same(found: tuple[list[float], Weights], wanted: tuple[list[float], Weights]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=TOLERANCE, abs=TOLERANCE)
    assert set(found[1]) == set(wanted[1])
    for key, weight in found[1].items():
        torch.testing.assert_close(weight, wanted[1][key], rtol=TOLERANCE, atol=TOLERANCE)


def assert_differ(found: tuple[list[float], Weights], other: tuple[list[float], Weights]) -> None:
    assert max((found[1][key] - other[1][key]).abs().max().item() for key in found[1]) > 1e-6


def rule_of(remedy: Remedy, delays: dict[int, int], version: Callable[[int, int], int]) -> Rule:
    """What a remedy is to do, where ``delays`` are those of the stages in a full pipeline."""
    match remedy:
        case LearningRateDiscount(num_updates, power):
            return Rule(version, discount=lambda delay, k: (1 + delay) ** (-power * max(1 - k / num_updates, 0)))
        case WeightPrediction(strength):
            return Rule(version, prediction={stage: strength * delay for stage, delay in delays.items()})
        case DiscrepancyCorrection(decay):
            movement = {stage: (delay, decay ** (1 / delay)) for stage, delay in delays.items() if delay}
            return Rule(version, movement=movement)
        case ErrorFeedback(strength):
            return Rule(version, feedback=strength)
    raise AssertionError(remedy)


def one_update_late(stage: int, update: int) -> int:
    return max(update - 1, 0)


@pytest.mark.parametrize("remedy", REMEDIES, ids=name_of)
@pytest.mark.parametrize("optimizer", [momentum, adam], ids=name_of)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (2, 1), (3, 4), (4, 3)])
def test_2bw_does_what_a_plain_loop_does(remedy: Remedy, optimizer: Any, num_ranks: int, num_microbatches: int) -> None:
    """With drains in between, which do not restart the rule of versions."""
    schedule = create("2bw", num_ranks=num_ranks, num_microbatches=num_microbatches)
    batches = [batch_of(schedule, step) for step in range(NUM_BATCHES)]
    rule = rule_of(remedy, dict.fromkeys(range(num_ranks), 1), one_update_late)
    found = run(schedule, remedy, optimizer, flushed=(0, 4))
    assert_same(found, train_stale(num_ranks, batches, optimizer, rule))
    assert_differ(found, train_stale(num_ranks, batches, optimizer, Rule(one_update_late)))


@pytest.mark.parametrize("remedy", REMEDIES[:3], ids=name_of)
@pytest.mark.parametrize("optimizer", [momentum, adam], ids=name_of)
@pytest.mark.parametrize("vertical_sync", [False, True])
def test_pipedream_does_what_a_plain_loop_does(remedy: Remedy, optimizer: Any, vertical_sync: bool) -> None:
    """Each rank with delays of its own; after a drain they build up anew."""
    num_ranks = 3
    schedule = create("pipedream", num_ranks=num_ranks, num_microbatches=2, vertical_sync=vertical_sync)
    delays = {stage: num_ranks - 1 - (0 if vertical_sync else stage) for stage in range(num_ranks)}
    halves = [
        half for step in range(NUM_BATCHES) for half in zip(*(part.chunk(2) for part in batch_of(schedule, step)))
    ]

    def version(stage: int, update: int) -> int:
        oldest = 10 if update >= 10 else 0  # drained after five batches
        return max(update - delays[stage], oldest)

    losses, weights = train_stale(num_ranks, halves, optimizer, rule_of(remedy, delays, version))
    found = run(schedule, remedy, optimizer, flushed=(4,))
    assert_same(found, ([(one + other) / 2 for one, other in zip(losses[::2], losses[1::2])], weights))
    assert_differ(found, train_stale(num_ranks, halves, optimizer, Rule(version)))


def test_error_feedback_on_pipedream_of_two_ranks() -> None:
    """Only the first rank is late, and after a drain there is no error to put right at first."""
    schedule = create("pipedream", num_ranks=2, num_microbatches=1)
    batches = [batch_of(schedule, step) for step in range(NUM_BATCHES)]

    def version(stage: int, update: int) -> int:
        return update if stage else max(update - 1, 4 if update >= 4 else 0)

    found = run(schedule, ErrorFeedback(0.7), momentum, flushed=(3,))
    assert_same(found, train_stale(2, batches, momentum, Rule(version, feedback=0.7)))


def test_decay_of_weights_is_no_velocity() -> None:
    schedule = create("2bw", num_ranks=2, num_microbatches=2)
    batches = [batch_of(schedule, step) for step in range(NUM_BATCHES)]
    rule = Rule(one_update_late, prediction={0: 0.5, 1: 0.5})
    assert_same(run(schedule, WeightPrediction(0.5), adamw), train_stale(2, batches, adamw, rule, decay=0.005))


def test_several_remedies_at_once() -> None:
    """In their order: the movement that is averaged is the one that error feedback has changed."""
    schedule = create("2bw", num_ranks=2, num_microbatches=2)
    batches = [batch_of(schedule, step) for step in range(NUM_BATCHES)]
    rule = Rule(
        one_update_late,
        movement={0: (1, 0.25), 1: (1, 0.25)},
        discount=lambda delay, update: (1 + delay) ** -max(1 - update / 4, 0),
        feedback=0.5,
    )
    remedies = [LearningRateDiscount(4), ErrorFeedback(0.5), DiscrepancyCorrection(0.25)]
    assert_same(run(schedule, remedies, momentum), train_stale(2, batches, momentum, rule))


def test_error_feedback_makes_up_for_the_delay() -> None:
    """Where gradients do not depend on the weights but for which batch they are of, only the last update is missing."""
    gradients = [torch.tensor(float(2**step)) for step in range(6)]
    weight = torch.nn.Parameter(torch.tensor(0.0))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    treatment = ErrorFeedback().on_rank(1)
    for update, gradient in enumerate(gradients):
        weight.grad = gradient
        treatment.before(optimizer, min(update, 1))
        optimizer.step()
        treatment.after(optimizer, min(update, 1))
    # The first is on time; the second belongs where the first was and is made good by the third, and so on.
    assert -weight.item() == 1 + (4 + 8 + 16 + 32) + 32


@pytest.mark.parametrize("remedy", REMEDIES, ids=name_of)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_nothing_changes_where_nothing_is_old(remedy: Remedy, schedule: str) -> None:
    chosen = create(schedule, num_ranks=2, num_microbatches=3)
    treated, untreated = (run(chosen, staleness, momentum) for staleness in (remedy, ()))
    assert treated[0] == untreated[0]
    assert all(torch.equal(weight, untreated[1][key]) for key, weight in treated[1].items())


@pytest.mark.parametrize("remedy", REMEDIES, ids=name_of)
@pytest.mark.parametrize("name", ["2bw", "pipedream"])
def test_a_checkpoint_goes_on_as_if_nothing_had_been(remedy: Remedy, name: str) -> None:
    num_ranks = 2 if isinstance(remedy, ErrorFeedback) else 3
    schedule = create(name, num_ranks=num_ranks, num_microbatches=2)

    def straight_and_resumed(context: RankContext) -> tuple[Weights, Weights]:
        options = {"loss_fn": squared_error, "optimizer": momentum, "staleness": remedy, "schedule": schedule}
        straight = Pipeline(make_stage, transport=context.transport, **options)
        for step in range(5):
            straight.train_step(*batch_of(schedule, step))
        state = copy.deepcopy(straight.state_dict())
        for step in range(5, 9):
            straight.train_step(*batch_of(schedule, step))
        wanted = newest(straight)
        resumed = Pipeline(make_stage, transport=context.transport, **options)
        resumed.load_state_dict(state)
        for step in range(5, 9):
            resumed.train_step(*batch_of(schedule, step))
        return wanted, newest(resumed)

    for wanted, found in launch_local(straight_and_resumed, num_ranks, backend="threads"):
        assert all(torch.equal(weight, found[key]) for key, weight in wanted.items())


def test_masters_are_moved_before_they_are_rounded() -> None:
    """Evaluation computes with the rounded masters, training with those moved ahead and rounded."""

    class Ahead(Treatment):
        def ahead(self, parameter: torch.nn.Parameter) -> Tensor:
            return torch.full_like(parameter, 0.5)

    module = torch.nn.Linear(3, 2).bfloat16()
    weights = ExtrapolatedWeights(module, 2, Ahead(), master=True)
    weights.begin_update(1)
    with torch.no_grad():
        weights.trained["weight"].fill_(1.0039)
    weights.publish()
    weights.use(None)
    assert module.weight.dtype == torch.bfloat16
    assert torch.equal(module.weight, torch.full((2, 3), 1.0039).bfloat16())
    weights.use(1)
    assert torch.equal(module.weight, torch.full((2, 3), 1.5039).bfloat16())
    weights.use(0)
    assert not torch.equal(module.weight, torch.full((2, 3), 1.5039).bfloat16())


def test_what_extrapolation_costs() -> None:
    """One copy of the weights beside the versions, and none per switch."""
    module = torch.nn.Linear(64, 64)
    weights = ExtrapolatedWeights(module, 2, Moving(1, 0.5))
    places = set()
    for version in (0, 1, None, 0, 1, None):
        weights.use(version)
        places.add(module.weight.data_ptr())
    assert len(places) == 3
    assert weights.trained["weight"].data_ptr() in places


@pytest.mark.parametrize(
    ("name", "staleness", "optimizer", "message"),
    [
        (
            "pipedream",
            ErrorFeedback(),
            momentum,
            r"delays of one update right: this schedule has delays of up to 2; take 2bw",
        ),
        (
            "2bw",
            WeightPrediction(),
            lambda p: torch.optim.SGD(p, lr=0.1),
            "Adam and AdamW keep: got SGD without momentum",
        ),
        ("2bw", WeightPrediction(), lambda p: torch.optim.RMSprop(p), "got RMSprop; take DiscrepancyCorrection"),
        ("2bw", [WeightPrediction(), DiscrepancyCorrection()], momentum, "take one of them"),
    ],
    ids=["feedback", "no momentum", "other velocity", "two predictions"],
)
def test_refusals(name: str, staleness: Any, optimizer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(create(name, num_ranks=3, num_microbatches=2), staleness, optimizer)


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(
        TypeError, match=r"staleness takes a remedy such as ErrorFeedback\(\), or a list of them: got 'T1'"
    ):
        run(create("2bw", num_ranks=1, num_microbatches=1), ["T1"], momentum)
    with pytest.raises(ValueError, match="fades over 1 update or more"):
        LearningRateDiscount(0)
    with pytest.raises(ValueError, match="at least 0 and less than 1: got 1"):
        DiscrepancyCorrection(1)
