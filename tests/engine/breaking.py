"""Streams that break in the midst, or are left there; functions that processes can import."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from delayed import Case, make_pipeline, train_rank
from failing import CannotBackward, CannotForward, CannotStep
from plain import make_batch, make_stage, squared_error

from stagewright.engine import PeerError, Pipeline, RankContext
from stagewright.engine.transport.contract import Channel, Session, Transport
from stagewright.engine.value import pack

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


def _exchange_what_never_comes(transport: Transport, channels: Sequence[Channel]) -> None:
    transport.gather(b"")
    transport.send(channels[1], pack(torch.ones(3), "stage 0"), 1, 0)
    transport.post(channels[0], 0, 0).wait()


def fail_with_receives_posted(context: RankContext) -> str:
    """Rank 0 fails while it awaits what rank 1 sends afterwards."""
    channels = [Channel(0, 1, "gradient", 1), Channel(1, 0, "activation", 1)]
    transport = context.transport
    transport.open(channels)
    transport.begin(Session(fixed_shapes=False))
    if context.rank == 0:
        transport.post(channels[1], 1, 0)
        transport.gather(b"")
        transport.abort("rank 0 failed")
        return ""
    with pytest.raises(PeerError) as told:  # wherever this rank is when it hears of it
        _exchange_what_never_comes(transport, channels)
    return str(told.value)
