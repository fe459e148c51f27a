"""Stages with batch norms."""

from typing import Any

import torch
from delayed import Case
from meanings import Named, buffers_of, together, weights_of
from plain import momentum, squared_error
from torch import Tensor, nn

from stagewright.engine import Pipeline, RankContext, make_mesh


class Norms(nn.Module):
    """A stage with two batch norms, one of them over three dimensions; and one in evaluation mode, which never learns.

    Args:
        stage: whose numbers it has.
        factor: the momentum of its batch norms.
    """

    def __init__(self, stage: int, factor: float | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.linear = nn.Linear(6, 6)
        self.flat = nn.BatchNorm1d(6, momentum=factor)
        self.long = nn.BatchNorm1d(3, momentum=factor)
        self.still = nn.BatchNorm1d(6)
        self.double()
        with torch.no_grad():
            for tensor in (*self.parameters(), self.still.running_mean):
                tensor.copy_(0.5 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
        self.still.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.flat(self.linear(x))
        x = x + self.long(input=x.reshape(-1, 3, 2)).reshape(-1, 6).tanh()
        return x + self.still(x)


class Build:
    """stage -> module."""

    def __init__(self, factor: float | None) -> None:
        self._factor = factor

    def __call__(self, stage: int) -> nn.Module:
        return Norms(stage, self._factor)


def train_overlapping(context: RankContext, case: Case, dp: int) -> list[Named]:
    """Buffers after each batch, some of them before and some after a drain; the weights in the end come last."""
    torch.set_num_threads(1)
    connection: dict[str, Any] = {"transport": context.transport}
    if dp > 1:
        connection = {"mesh": make_mesh(pp=case.num_ranks, dp=dp, context=context)}
    results: list[Named] = []
    with Pipeline(
        Build(None),
        schedule=case.schedule,
        num_microbatches=case.num_microbatches,
        loss_fn=squared_error,
        optimizer=momentum,
        **connection,
        deferred_batch_norm=True,
        dynamic_shapes=True,
        recompute=case.recompute,
        **case.options,
    ) as pipe:
        for step, batch in enumerate(case.batches):
            pipe.train_step(*(tensor.tensor_split(dp)[pipe.replica] for tensor in batch))
            results.append(buffers_of(pipe.modules))
            if step in case.actions:
                pipe.eval_step(*case.other_batch, num_microbatches=2)
                assert together([results[-1], buffers_of(pipe.modules)])
        pipe.flush()
        return [*results, weights_of(pipe.modules)]
