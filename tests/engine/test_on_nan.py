"""A loss that is NaN or infinite: every rank raises, or no rank updates, and a plain loop does the same."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final

import pytest
import torch
from faulty import FAULTY_STEP, adam, batches_with, catch, make
from launching import launch_on
from meanings import ALL, Named, assert_close, gradients_of, make_batches, on_threads, under, weights_of
from plain import make_stage, squared_error
from torch import Tensor, nn

from stagewright.engine import NotFiniteError, PeerError, Pipeline, RankContext, make_mesh
from stagewright.schedules import Schedule, ScheduleError, create
from stagewright.schedules.instructions import SyncScalars

WORDS: Final = "the loss of microbatch 2 is NaN or infinite (step 1); no rank has made this update"


def sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return ((output - target) ** 2).sum(), target.numel()


def train(
    context: RankContext, schedule: Schedule, value: float, options: Mapping[str, Any]
) -> tuple[list[bool], list[Any], set[int], Named]:
    skipped, losses = [], []
    with make(context, schedule, share_loss=True, **options) as pipe:
        for batch in batches_with(value):
            losses.append(pipe.train_step(*batch))
            skipped.append(pipe.skipped)
        pipe.flush()
        skipped.append(pipe.skipped)
        assert pipe.optimizer is not None
        steps = {int(state["step"]) for state in pipe.optimizer.state.values()}
        return skipped, losses, steps, weights_of(pipe.modules)


def train_plainly(num_stages: int, batches: Sequence[tuple[Tensor, Tensor]], *, delay: int = 0) -> Named:
    """An update with each batch whose loss is finite, by gradients of weights that are so many versions older."""
    modules = {stage: make_stage(stage) for stage in range(num_stages)}
    model = nn.Sequential(*modules.values())
    optimizer = adam(model.parameters())
    versions = [deepcopy(model.state_dict())]
    for step, (x, y) in enumerate(batches):
        model.load_state_dict(versions[max(step - delay, 0)])
        optimizer.zero_grad()
        loss = squared_error(model(x), y)
        loss.backward()
        model.load_state_dict(versions[-1])
        if math.isfinite(loss.item()):
            optimizer.step()
        versions.append(deepcopy(model.state_dict()))
    return weights_of(modules)


@under(ALL)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_all_ranks_skip_the_update_of_such_a_batch(schedule: Schedule, value: float) -> None:
    """Neither weights nor the state of any optimizer have moved, and training goes on as if nothing were."""
    results = on_threads(train, schedule, value, {"on_nan": "skip"})
    for skipped, losses, steps, _ in results:
        assert skipped == [False, True, False, False, False]
        assert [math.isfinite(loss) for loss in losses] == [True, False, True, True]
        assert steps == {3}
    expected = train_plainly(schedule.num_stages, batches_with(value))
    assert_close([weights for *_, weights in results], expected)


@pytest.mark.parametrize(
    "options",
    [{"loss_fn": sum_and_count}, {"max_norm": 1e6}, {"loss_scale": 4.0}],
    ids=lambda options: next(iter(options)),
)
def test_it_goes_with_what_else_ranks_agree_on(options: Mapping[str, Any]) -> None:
    schedule = create("1f1b", num_ranks=4, num_microbatches=4)
    results = on_threads(train, schedule, math.nan, {"on_nan": "skip", **options})
    for skipped, *_ in results:
        assert skipped == [False, True, False, False, False]
    assert_close([weights for *_, weights in results], train_plainly(4, batches_with(math.nan)))


def test_without_it_nobody_looks() -> None:
    """A NaN spreads over all weights, as in a plain loop."""
    schedule = create("1f1b", num_ranks=2, num_microbatches=4)
    for skipped, _, steps, weights in on_threads(train, schedule, math.nan, {}):
        assert skipped == [False] * 5
        assert steps == {4}
        assert all(weight.isnan().all() for weight in weights.values())


def test_it_is_in_the_program() -> None:
    """Ranks agree by an instruction, also where the loss is a mean and nothing else asks for it."""
    with Pipeline(make_stage, num_microbatches=2, loss_fn=squared_error, optimizer=adam, on_nan="skip") as pipe:
        for batch in make_batches(3):
            pipe.train_step(*batch)
        assert SyncScalars() in pipe.program.streams[0]


@under(ALL)
def test_every_rank_raises_and_names_the_microbatch_and_the_step(schedule: Schedule) -> None:
    """Before any weight has changed: whoever catches it on all ranks can go on."""
    results = on_threads(catch, schedule, {})
    for said, num_steps, _ in results:
        assert said == WORDS + ": on_nan='skip' goes on without it"
        assert num_steps == FAULTY_STEP
    expected = train_plainly(schedule.num_stages, batches_with(math.nan))
    assert_close([weights for *_, weights in results], expected)


def test_processes_raise_it_too() -> None:
    schedule = create("1f1b", num_ranks=3, num_microbatches=4)
    results = launch_on("gloo", catch, 3, (schedule, {"max_norm": 1e6}))
    assert all(said.startswith(WORDS) for said, *_ in results)
    assert_close([weights for *_, weights in results], train_plainly(3, batches_with(math.nan)))


def raise_uncaught(context: RankContext, schedule: Schedule) -> None:
    with make(context, schedule, on_nan="raise") as pipe:
        for batch in batches_with(math.nan):
            pipe.train_step(*batch)


def test_the_launcher_raises_what_the_ranks_have_raised() -> None:
    with pytest.raises(FloatingPointError, match="loss of microbatch 2 is NaN or infinite"):
        on_threads(raise_uncaught, create("zb-h1", num_ranks=4, num_microbatches=4))


def accumulate(context: RankContext, schedule: Schedule) -> tuple[list[bool], Named]:
    skipped = []
    with make(context, schedule, on_nan="skip", optimizer=None) as pipe:
        for batch in batches_with(math.nan, 3):
            pipe.forward_backward(*batch)
            skipped.append(pipe.skipped)
        return skipped, gradients_of(pipe.modules)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_a_trainer_that_steps_by_itself_keeps_the_gradients_of_the_other_batches(name: str) -> None:
    results = on_threads(accumulate, create(name, num_ranks=4, num_microbatches=4))
    modules = {stage: make_stage(stage) for stage in range(4)}
    model = nn.Sequential(*modules.values())
    for step, (x, y) in enumerate(make_batches(3)):
        if step != FAULTY_STEP:
            squared_error(model(x), y).backward()
    assert all(skipped == [False, True, False] for skipped, _ in results)
    assert_close([gradients for _, gradients in results], gradients_of(modules))


def test_without_a_flush_the_update_of_that_batch_alone_is_left_out() -> None:
    """The batches under way go on, with the versions of the weights that they began with."""
    results = on_threads(train, create("2bw", num_ranks=2, num_microbatches=4), math.nan, {"on_nan": "skip"})
    for skipped, _, steps, _ in results:
        assert sum(skipped) == 1
        assert steps == {3}
    assert_close([weights for *_, weights in results], train_plainly(2, batches_with(math.nan), delay=1))


def catch_without_flush(context: RankContext, schedule: Schedule) -> str:
    try:
        raise_uncaught(context, schedule)
    except (NotFiniteError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_without_a_flush_all_ranks_end() -> None:
    """Each makes the update in its own time, so the first one to raise tells the others."""
    said = on_threads(catch_without_flush, create("2bw", num_ranks=3, num_microbatches=4))
    assert all("the loss of microbatch 2 is NaN or infinite (step 1)" in text for text in said)
    assert any(text.startswith("NotFiniteError") for text in said)


def only_make(context: RankContext, schedule: Schedule, on_nan: Any) -> None:
    make(context, schedule, on_nan=on_nan).close()


def test_updates_of_each_stage_by_itself_cannot_be_skipped_together() -> None:
    schedule = create("pipedream", num_ranks=2, num_microbatches=4)
    with pytest.raises(ScheduleError, match="pipedream updates each stage by itself .* on_nan .* need 2bw or a synchr"):
        on_threads(only_make, schedule, "skip")


def test_what_else_it_might_be_is_refused() -> None:
    with pytest.raises(ValueError, match='on_nan is "raise", "skip" or None: got \'ignore\''):
        on_threads(only_make, create("1f1b", num_ranks=2, num_microbatches=4), "ignore")


def train_replicas(context: RankContext, on_nan: str, loss_fn: Callable[..., Any]) -> tuple[Any, ...]:
    """The second replica has the rows with the fault."""
    torch.set_num_threads(1)
    said, skipped = "", []
    mesh = make_mesh(pp=2, dp=2, context=context)
    options: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 2, "loss_fn": loss_fn, "optimizer": adam}
    with Pipeline(make_stage, mesh=mesh, on_nan=on_nan, **options) as pipe:
        rows = slice(0, 5) if pipe.replica == 0 else slice(5, 9)
        for x, y in batches_with(math.nan):
            try:
                pipe.train_step(x[rows], y[rows])
            except NotFiniteError as error:
                said = str(error)
            skipped.append(pipe.skipped)
        return said, skipped, weights_of(pipe.modules)


@pytest.mark.parametrize("loss_fn", [squared_error, sum_and_count])
def test_replicas_skip_together(loss_fn: Callable[..., Any]) -> None:
    results = launch_on("threads", train_replicas, 4, ("skip", loss_fn))
    assert all(skipped == [False, True, False, False] for _, skipped, _ in results)
    assert_close([weights for *_, weights in results], train_plainly(2, batches_with(math.nan)))


def test_replicas_raise_together_and_name_the_one() -> None:
    results = launch_on("threads", train_replicas, 4, ("raise", squared_error))
    for said, *_ in results:
        assert said.startswith("the loss of microbatch 0 of replica 1 is NaN or infinite (step 1); no rank")
    assert_close([weights for *_, weights in results], train_plainly(2, batches_with(math.nan)))


def test_a_skipped_step_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        on_threads(train, create("1f1b", num_ranks=4, num_microbatches=4), math.nan, {"on_nan": "skip"})
    messages = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
    assert messages == ["the loss of microbatch 2 is NaN or infinite (step 1): no rank makes this update"]
