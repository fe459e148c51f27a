"""Trainings that are disturbed on their way; functions that processes can import."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from delayed import Case, Trained, train_rank
from injecting import InjectingTransport, Shuffler, interrupted
from plain import make_batch, make_stage, momentum, squared_error
from tied import TIED, Build, make_text, sum_and_count

from stagewright.engine import Pipeline, RankContext, make_mesh
from stagewright.engine.launch.context import context_of

# One of each kind: a chain, a V, two directions, chunks in turn, halves, stages with replicas, and two without a flush.
CASES: Final[Mapping[str, Case]] = MappingProxyType(
    {
        "1f1b": Case(3, 4, "1f1b", num_batches=3, model="tied", max_norm=0.3, actions={1: "evaluate"}),
        "zbv": Case(2, 4, "zbv", num_batches=3, model="dropout", max_norm=0.3),
        "dualpipe": Case(2, 4, "dualpipe", num_batches=3),
        "interleaved": Case(2, 4, "interleaved", {"num_chunks": 2}, num_batches=3, actions={1: "predict"}),
        "zb-h1": Case(4, 4, "zb-h1", num_batches=3, optimizer="adam"),
        "2bw": Case(3, 4, num_batches=4, model="tied", max_norm=0.3, decays=True, actions={2: "flush"}),
        "pipedream": Case(3, 4, "pipedream", {"replicas": (2, 1)}, num_batches=3, per_update=2),
    }
)
NUM_RANKS: Final[Mapping[str, int]] = MappingProxyType(
    {**{name: case.num_ranks for name, case in CASES.items()}, "replicas": 4}
)


def train(context: RankContext, name: str) -> Trained:
    """One rank's share of a training, by its name: one of CASES, or two ranks in two replicas."""
    return train_replica(context) if name == "replicas" else train_rank(context, CASES[name])


def train_replica(context: RankContext) -> Trained:
    """Two stages whose weights are tied, in two replicas, under a loss that comes as (sum, count)."""
    torch.set_num_threads(1)
    result = Trained()
    with Pipeline(
        Build(2),
        schedule="1f1b",
        num_microbatches=3,
        loss_fn=sum_and_count,
        optimizer=momentum,
        mesh=make_mesh(pp=2, dp=2, context=context),
        tied=TIED,
        max_norm=0.3,
        share_loss=True,
    ) as pipe:
        for step in range(3):
            loss = pipe.train_step(*make_text(5, 10 * step + pipe.replica))
            assert loss is not None
            result.losses.append(loss.item())
            result.norms.append(pipe.grad_norm)
        result.weights = {
            (stage, name): weight.detach().clone()
            for stage, module in pipe.modules.items()
            for name, weight in module.named_parameters()
        }
    return result


def train_disturbed(context: RankContext, name: str, seeds: range) -> list[tuple[Trained, int]]:
    """A training of processes again and again, with what was heard of signals that woke them for nothing."""
    results = []
    for seed in seeds:
        transport = InjectingTransport(context.transport, Shuffler((name, seed, context.rank)))
        with interrupted() as num_signals:
            results.append((train(context_of(transport), name), num_signals[0]))
    return results


def train_small(context: RankContext, options: Mapping[str, Any], num_steps: int) -> list[float | None]:
    """The losses of a small training."""
    torch.set_num_threads(1)
    with Pipeline(
        make_stage, loss_fn=squared_error, optimizer=momentum, transport=context.transport, **options
    ) as pipe:
        losses = [pipe.train_step(*make_batch(4, step)) for step in range(num_steps)]
    return [None if loss is None else loss.item() for loss in losses]
