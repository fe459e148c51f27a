"""What goes wrong in the midst of a stream that never ends: nobody hangs, and everybody learns why."""

from typing import Any

import pytest
import torch
from delayed import Case, make_pipeline, newest_of, train_delayed, train_rank
from failing import CannotBackward, CannotForward, CannotStep
from launching import launch_on
from plain import make_batch, make_stage, squared_error

from stagewright.engine import PeerError, Pipeline, RankContext, launch_local

FAILING_RANK = 1


def pipeline_that_fails(context: RankContext, where: str, schedule: str, options: dict[str, Any]) -> Pipeline:
    fails = context.rank == FAILING_RANK
    module: Any = {"forward": CannotForward, "backward": CannotBackward}.get(where, make_stage)
    optimizer = CannotStep if fails and where == "optimizer" else torch.optim.SGD
    return Pipeline(
        module if fails else make_stage,
        schedule=schedule,
        num_microbatches=4,
        loss_fn=squared_error,
        optimizer=lambda named: optimizer(named, lr=0.1),
        transport=context.transport,
        **options,
    )


def what_was_seen(context: RankContext, where: str, schedule: str, options: dict[str, Any]) -> tuple[str, str]:
    """The error of each rank, and that of whoever goes on nevertheless."""
    seen = []
    pipe = pipeline_that_fails(context, where, schedule, options)
    for attempt in range(2):
        try:
            for step in range(attempt, 10):
                pipe.train_step(*make_batch(8, step))
        except (PeerError, ValueError, RuntimeError) as error:
            seen.append(f"{type(error).__name__}: {error}")
    first, second = seen
    return first, second


# Where rank 1 of 3 fails: it does one forward before each backward but for its first, which it computes in between.
PLACES = [
    ("forward", "2bw", {}, "1F6@0"),
    ("backward", "2bw", {}, "1B6@0"),
    ("optimizer", "2bw", {}, "1STEP@2"),
    ("optimizer", "2bw", {"max_norm": 1.0}, "1STEP@2"),
    ("backward", "pipedream", {}, "1B6@5"),
]


@pytest.mark.parametrize(("where", "schedule", "options", "instruction"), PLACES)
def test_every_rank_learns_who_failed_and_where(
    where: str, schedule: str, options: dict[str, Any], instruction: str
) -> None:
    """And none goes on from where it stood: what was in flight is lost."""
    results = launch_local(what_was_seen, 3, backend="threads", args=(where, schedule, options))
    for rank, (first, second) in enumerate(results):
        reason = f"ValueError: boom in {where}"
        if rank == FAILING_RANK:
            assert first == reason
        else:
            assert first.startswith(f"PeerError: rank 1 failed at {instruction} (step "), first
            assert first.endswith(reason)
        assert second.startswith(f"RuntimeError: a batch has failed, and with it all that {schedule} had in flight")


def fail_in_processes(context: RankContext) -> str:
    torch.set_num_threads(1)
    first, _ = what_was_seen(context, "backward", "2bw", {})
    return first


def go_on_alone() -> tuple[Pipeline, CannotForward]:
    module = CannotForward(0)
    return Pipeline(
        {0: module},
        schedule="2bw",
        num_microbatches=4,
        loss_fn=squared_error,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    ), module


def test_a_state_that_was_saved_leads_on_after_a_failure() -> None:
    """A failed batch leaves half of its gradients, which must go into no update."""
    pipe, module = go_on_alone()
    pipe.train_step(*make_batch(8, 0))
    state = pipe.state_dict()
    kept = {name: weight.clone() for name, weight in state["stages"][0].items()}
    state["stages"] = {0: kept}
    for call in (lambda: pipe.train_step(*make_batch(8, 1)), pipe.flush, lambda: pipe.eval_step(*make_batch(8, 1))):
        with pytest.raises((ValueError, RuntimeError), match="boom in forward|load a state that was saved before"):
            call()
    pipe.load_state_dict(state)
    module.num_forwards = 100
    losses = [pipe.train_step(*make_batch(8, step)) for step in (1, 2)]
    other, module = go_on_alone()
    module.num_forwards = 100
    expected = [other.train_step(*make_batch(8, step)) for step in range(3)]
    assert losses == expected[1:]


# Left in the middle


CLIPPED = Case(3, 4, num_batches=3, max_norm=0.3)
# Its last update does not take the place of the version that was used last.
SHORT = Case(3, 1, "pipedream", num_batches=1)


def leave(context: RankContext, how: str, case: Case) -> Any:
    """Train some batches, and then end a ``with`` block, or the pipeline without flushing it; and begin another."""
    if how == "with":
        with make_pipeline(context, case) as pipe:
            for batch in case.batches:
                pipe.train_step(*batch)
    else:
        pipe = make_pipeline(context, case)
        for batch in case.batches:
            pipe.train_step(*batch)
        pipe.close()
    weights = {
        (stage, name): weight.detach().clone()
        for stage, module in pipe.modules.items()
        for name, weight in module.named_parameters()
    }
    try:
        return weights, train_rank(context, case).losses
    except ValueError as error:
        return weights, str(error)


@pytest.mark.parametrize("case", [CLIPPED, SHORT], ids=["2bw", "pipedream"])
def test_the_end_of_a_with_block_flushes(case: Case) -> None:
    """The modules have the newest weights then, and the transport is free."""
    plain = train_delayed(case)
    for weights, losses in launch_local(leave, 3, backend="threads", args=("with", case)):
        for key, weight in weights.items():
            torch.testing.assert_close(weight, plain.weights[key], rtol=1e-11, atol=1e-11)
        assert losses == pytest.approx(plain.losses, rel=1e-11)


@pytest.mark.parametrize("kind", ["threads"])
def test_closing_without_a_flush_ends_at_once(kind: Any) -> None:
    """What was in flight is lost; the transport, which still has it, says so to whoever comes next."""
    for _, told in launch_on(kind, leave, 3, ("close", CLIPPED)):
        assert told.startswith("another pipeline has microbatches in flight on this transport: call its flush() before")


def raise_in_block(context: RankContext) -> None:
    """An error of the trainer's own, on one rank, between two batches."""
    case = Case(context.num_ranks, 4, num_batches=3)
    with make_pipeline(context, case) as pipe:
        for batch in case.batches:
            pipe.train_step(*batch)
        if context.rank == 0:
            raise OSError(5, "boom on a disk")
        for batch in case.batches:  # the others go on, so that no gradient of the last batch comes back
            pipe.train_step(*batch)


def test_an_error_between_batches_is_not_held_up_by_a_flush() -> None:
    """Which the others would not take part in."""
    with pytest.raises(OSError, match="boom on a disk"):
        launch_local(raise_in_block, 3, backend="threads")


def train_after_flushes(context: RankContext) -> Any:
    case = Case(context.num_ranks, 3, num_batches=4)
    with make_pipeline(context, case) as pipe:
        pipe.flush()  # nothing is there yet
        for batch in case.batches:
            pipe.train_step(*batch)
            pipe.flush()
            pipe.flush()  # nothing is there any more
        return newest_of(pipe)


def test_a_flush_of_nothing_does_nothing() -> None:
    plain = train_delayed(Case(3, 3, num_batches=4))
    for weights in launch_local(train_after_flushes, 3, backend="threads"):
        for key, weight in weights.items():
            torch.testing.assert_close(weight, plain.weights[key], rtol=1e-11, atol=1e-11)
