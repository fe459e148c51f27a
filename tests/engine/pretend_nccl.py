"""NCCL's transport in processes without a GPU: gloo groups play NCCL's part."""

from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from plain import Result, train_pipelined

from stagewright.engine import RankContext
from stagewright.engine.launch.context import context_of
from stagewright.engine.transport.nccl import nccl_transport


def new_group(original: Any, ranks: list[int] | None = None, *, backend: str) -> Any:
    """A group over gloo, whatever was asked for."""
    assert backend in ("nccl", "gloo")
    return original(ranks, backend="gloo")


def train_over_groups(context: RankContext, rows: int, steps: int, options: dict[str, Any]) -> Result:
    """Train over two-rank groups, made as those of NCCL are."""
    with mock.patch.object(dist, "new_group", partial(new_group, dist.new_group)):
        return train_pipelined(context_of(nccl_transport(torch.device("cpu"))), rows, steps, options)
