"""Copies of stages that are not alike."""

from collections.abc import Mapping
from typing import Any

import torch
from plain import make_batch, momentum, squared_error
from torch import nn

from stagewright.engine import Pipeline, RankContext, make_mesh


def build(kind: str) -> nn.Module:
    """From six numbers to six."""
    module: nn.Module
    match kind:
        case "wide":
            module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
        case "three":
            module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
        case "named":
            module = nn.Sequential()
            module.add_module("first", nn.Linear(6, 6))
            module.add_module("1", nn.Linear(6, 6))
        case _:
            module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    if kind == "frozen":
        module.get_parameter("1.bias").requires_grad_(False)
    if kind == "counting":
        module.register_buffer("count", torch.zeros(()))
    return module.float() if kind == "single" else module.double()


def try_to_train(
    context: RankContext, kinds: Mapping[int, str], schedule: str, dp: int, options: Mapping[str, Any]
) -> str:
    """What comes of it on this rank, which builds a kind of its own; empty where it trains."""
    torch.set_num_threads(1)
    connection: dict[str, Any] = {"transport": context.transport}
    if dp > 1:
        connection = {"mesh": make_mesh(pp=context.num_ranks // dp, dp=dp, context=context)}
    try:
        with Pipeline(
            lambda stage: build(kinds.get(context.rank, "plain")),
            schedule=schedule,
            num_microbatches=4,
            loss_fn=squared_error,
            optimizer=momentum,
            **connection,
            **options,
        ) as pipe:
            pipe.train_step(*make_batch(8, 0))
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
