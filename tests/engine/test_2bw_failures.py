"""What goes wrong in the midst of a stream that never ends: nobody hangs, and everybody learns why."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from breaking import CLIPPED, FAILING_RANK, SHORT, leave, raise_in_block, what_was_seen
from delayed import Case, make_pipeline, newest_of, train_delayed
from failing import CannotForward
from launching import launch_on
from plain import make_batch, squared_error

from stagewright.engine import Pipeline, RankContext, launch_local

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
    check(results, where, schedule, instruction)


def test_every_process_learns_it_too() -> None:
    check(launch_local(what_was_seen, 3, args=("backward", "2bw", {})), "backward", "2bw", "1B6@0")


def check(results: Sequence[tuple[str, str]], where: str, schedule: str, instruction: str) -> None:
    """``what_was_seen``, rank by rank."""
    for rank, (first, second) in enumerate(results):
        reason = f"ValueError: boom in {where}"
        if rank == FAILING_RANK:
            assert first == reason
        else:
            assert first.startswith(f"PeerError: rank 1 failed at {instruction} (step "), first
            assert first.endswith(reason)
        assert second.startswith(f"RuntimeError: a batch has failed, and with it all that {schedule} had in flight")


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


@pytest.mark.parametrize("case", [CLIPPED, SHORT], ids=["2bw", "pipedream"])
def test_the_end_of_a_with_block_flushes(case: Case) -> None:
    """The modules have the newest weights then, and the transport is free."""
    plain = train_delayed(case)
    for weights, losses in launch_local(leave, 3, backend="threads", args=("with", case)):
        for key, weight in weights.items():
            torch.testing.assert_close(weight, plain.weights[key], rtol=1e-11, atol=1e-11)
        assert losses == pytest.approx(plain.losses, rel=1e-11)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_closing_without_a_flush_ends_at_once(kind: Any) -> None:
    """What was in flight is lost; the transport, which still has it, says so to whoever comes next."""
    for _, told in launch_on(kind, leave, 3, ("close", CLIPPED)):
        assert told.startswith("another pipeline has microbatches in flight on this transport: call its flush() before")


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
