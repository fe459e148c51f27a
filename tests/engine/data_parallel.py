"""Replicas of a pipeline that train together, each on its rows of the batch, held against the plain loop."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from delayed import Case, Trained, assert_drained, make_pipeline, newest_of
from plain import Result, assert_nothing_in_flight, make_batch, make_stage, momentum, note_parameters, squared_error
from torch import Tensor, nn

from stagewright.engine import PeerError, Pipeline, RankContext, make_mesh
from stagewright.engine.transport.threads import ThreadTransport


def share_of(batch: tuple[Tensor, Tensor], parts: Sequence[int], replica: int) -> tuple[Tensor, Tensor]:
    """The rows of one replica, of so many each."""
    x, y = batch
    return x.split(list(parts))[replica], y.split(list(parts))[replica]


def train_replica(context: RankContext, parts: Sequence[int], steps: int, options: dict[str, Any]) -> Result:
    """One rank of a mesh: what ``plain.train_plainly`` does, on the rows of this rank's replica.

    Args:
        context: of the rank.
        parts: rows of each replica.
        steps: updates.
        options: of the pipeline.
    """
    torch.set_num_threads(1)
    dp = len(parts)
    mesh = make_mesh(pp=context.num_ranks // dp, dp=dp, context=context)
    options = {"build_stage": make_stage, "loss_fn": squared_error, "optimizer": momentum, **options}
    result = Result()
    with Pipeline(mesh=mesh, share_loss=True, **options) as pipe:
        assert (pipe.replica, pipe.num_replicas) == (mesh.get_local_rank("dp"), dp)
        for step in range(steps):
            loss = pipe.train_step(*share_of(make_batch(sum(parts), step), parts, pipe.replica))
            assert loss is not None
            result.losses.append(loss.item())
            assert_nothing_in_flight(pipe)
        pipe.forward_backward(*share_of(make_batch(sum(parts), steps), parts, pipe.replica))
        note_parameters(result, pipe.modules)
        outputs = pipe.predict(make_batch(sum(parts), 99)[0])
        result.outputs = outputs
        assert_nothing_in_flight(pipe)
        context.transport.gather(b"")
        if isinstance(context.transport, ThreadTransport):
            assert context.transport._hub.num_waiting == 0
    return result


def train_many(context: RankContext, cases: Sequence[tuple[Sequence[int], int, dict[str, Any]]]) -> list[Result]:
    """Several trainings one after the other: starting processes takes long."""
    return [train_replica(context, *case) for case in cases]


def assert_replicas_equal(results: Sequence[Result], dp: int) -> None:
    """Every rank of every replica has, bit by bit, the weights, gradients and losses of the same rank of the first."""
    for start in range(0, len(results), dp):
        first, *others = results[start : start + dp]
        for other in others:
            assert other.losses == first.losses
            for ours, theirs in ((other.weights, first.weights), (other.gradients, first.gradients)):
                assert set(ours) == set(theirs)
                assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def rows_of_replica(case: Case, batch: tuple[Tensor, Tensor], replica: int, dp: int) -> tuple[Tensor, Tensor]:
    """The rows that a replica has of every microbatch of a batch."""
    x, y = (
        torch.cat([part.tensor_split(dp)[replica] for part in whole.tensor_split(case.num_microbatches)])
        for whole in batch
    )
    return x, y


def train_asynchronously(context: RankContext, case: Case, dp: int) -> Trained:
    """One rank of a mesh: what ``delayed.train_rank`` does, on this replica's rows of every microbatch."""
    torch.set_num_threads(1)
    mesh = make_mesh(pp=case.num_ranks, dp=dp, context=context)
    result = Trained()
    nowhere: Any = None
    with make_pipeline(replace(context, transport=nowhere), case, mesh=mesh) as pipe:
        scheduler = None
        if pipe.optimizer is not None and case.decays:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.9)
        for step, batch in enumerate(case.batches):
            loss = pipe.train_step(*rows_of_replica(case, batch, pipe.replica, dp))
            assert loss is not None
            result.losses.append(loss.item())
            if scheduler is not None:
                scheduler.step()
            if case.actions.get(step) == "flush":
                pipe.flush()
            elif case.actions.get(step) == "evaluate":
                evaluated = pipe.eval_step(
                    *rows_of_replica(case, case.other_batch, pipe.replica, dp), num_microbatches=1
                )
                assert evaluated is not None
                result.evaluated.append(evaluated.item())
        result.weights = newest_of(pipe)
        result.norms.append(pipe.grad_norm)
        assert_drained(pipe)
    return result


class Failing(nn.Module):
    """Fails when it is told to."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.block = make_stage(stage)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        if fail:
            raise ArithmeticError("no")
        y: Tensor = self.block(x)
        return y


def fail_in_one_replica(context: RankContext) -> str:
    """What every rank of two replicas hears when rank 1 of replica 1 fails; nobody ends for that."""
    torch.set_num_threads(1)
    pipe = Pipeline(
        Failing,
        schedule="1f1b",
        num_microbatches=2,
        loss_fn=squared_error,
        optimizer=momentum,
        mesh=make_mesh(pp=2, dp=2, context=context),
    )
    pipe.train_step(*make_batch(4, 0))
    try:
        pipe.train_step(*make_batch(4, 0), fail=context.rank == 3)
    except (ArithmeticError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
