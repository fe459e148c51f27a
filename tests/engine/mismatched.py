"""Ranks with arguments, data and batches of their own; functions that processes can import."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from plain import make_batch, make_stage, momentum, squared_error

from stagewright.engine import PeerError, Pipeline, RankContext, make_mesh

COMMON: Final[Mapping[str, Any]] = {
    "build_stage": make_stage,
    "schedule": "1f1b",
    "num_microbatches": 4,
    "loss_fn": squared_error,
    "optimizer": momentum,
}


def try_to_begin(context: RankContext, of_ranks: Mapping[int, Mapping[str, Any]], dp: int = 1) -> str:
    """What a rank has to say against its pipeline; nothing where it trains. A rank may have arguments of its own."""
    torch.set_num_threads(1)
    where = {"mesh": make_mesh(pp=2, dp=dp, context=context)} if dp > 1 else {"transport": context.transport}
    try:
        with Pipeline(**{**COMMON, **of_ranks.get(context.rank, {}), **where}) as pipe:
            pipe.train_step(*make_batch(8, 0))
    except (ValueError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def begin_twice(context: RankContext) -> list[str]:
    wrong = {rank: {"schedule": "1g1b"} for rank in range(context.num_ranks)}
    return [try_to_begin(context, of_ranks) for of_ranks in (wrong, {1: {"seed": 1}}, {})]


def train_to_the_end_of_the_data(context: RankContext, schedule: str, short: int) -> str:
    """One rank has one batch less than the others."""
    torch.set_num_threads(1)
    num_batches = 2 if context.rank == short else 3
    try:
        with Pipeline(**{**COMMON, "schedule": schedule}, transport=context.transport, share_loss=True) as pipe:
            for step in range(num_batches):
                pipe.train_step(*make_batch(8, step))
    except PeerError as error:
        return str(error)
    return f"{pipe.num_steps} steps"


def train_on_few_rows(context: RankContext, rows: Sequence[int]) -> str:
    """Each rank gets what it reads alone, as from a loader of its own; what it refuses is caught on every rank."""
    torch.set_num_threads(1)
    with Pipeline(**COMMON, transport=context.transport) as pipe:
        try:
            for step, num_rows in enumerate(rows):
                context.transport.gather(b"")  # nobody is still in the step before
                x, y = make_batch(num_rows, step)
                pipe.train_step(x if pipe.rank == 0 else None, y if pipe.rank == context.num_ranks - 1 else None)
        except (ValueError, PeerError) as error:
            return f"{pipe.num_steps}: {type(error).__name__}: {error}"
    return "all"
