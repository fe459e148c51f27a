"""A tiny model trained in every way that the benches compare; functions that processes can import."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.bench import overhead
from stagewright.bench.overhead import PlainLoop, tiny_stage
from stagewright.bench.peers import GPipeLoop, OneForwardOneBackwardLoop, TorchPeer, make_group, squared_error
from stagewright.engine import RankContext

NUM_MICROBATCHES = 8


def _weights_by(context: RankContext, way: str) -> list[Tensor]:
    """The weights of this rank after two steps."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [tiny_stage(stage) for stage in range(2)]
    x, y = torch.randn(2, overhead.ROWS * NUM_MICROBATCHES, overhead.HIDDEN)
    own = copy.deepcopy(modules[context.rank])
    shape = (NUM_MICROBATCHES, squared_error)
    step: Any
    match way:
        case "ours":
            step = overhead.pipeline_of(context, "1f1b", {context.rank: own}).train_step
        case "torch":
            step = TorchPeer("1f1b", {context.rank: own}, 2, *shape, make_group()).step
        case "gpipe by hand":
            step = GPipeLoop(context, own, *shape, make_group()).step
        case "1f1b by hand":
            step = OneForwardOneBackwardLoop(context, own, *shape, make_group()).step
        case _:
            own = nn.Sequential(*modules)
            step = PlainLoop(own).step
    for _ in range(2):
        step(x, y)
    return [weight.detach() for weight in own.parameters()]


def weights_by_way(context: RankContext) -> dict[str, list[Tensor]]:
    """By way, the weights of this rank after two steps."""
    ways = ("ours", "torch", "gpipe by hand", "1f1b by hand", "plain")
    return {way: _weights_by(context, way) for way in ways}
