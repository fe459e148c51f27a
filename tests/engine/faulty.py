"""Training on batches of which one has a loss that is no number; functions that processes can import."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from meanings import Named, make_batches, weights_of
from plain import make_stage, squared_error
from torch import Tensor

from stagewright.engine import NotFiniteError, Pipeline, RankContext
from stagewright.schedules import Schedule

FAULTY_STEP: Final = 1
# Batches of 9 rows in 4 microbatches, of 3, 2, 2 and 2 rows: row 5 is in microbatch 2, and row 7 in microbatch 3.
FAULTY_ROWS: Final = (5, 7)


def batches_with(value: float, num_batches: int = 4) -> Sequence[tuple[Tensor, Tensor]]:
    """In one batch the targets of some rows are no numbers."""
    batches = [(x, y.clone()) for x, y in make_batches(num_batches)]
    batches[FAULTY_STEP][1][list(FAULTY_ROWS)] = value
    return batches


def adam(named: Any) -> torch.optim.Optimizer:
    """Counts its steps."""
    return torch.optim.Adam(named, lr=0.01)


def make(context: RankContext, schedule: Schedule, **options: Any) -> Pipeline:
    torch.set_num_threads(1)
    options = {"loss_fn": squared_error, "optimizer": adam, "transport": context.transport, **options}
    return Pipeline(make_stage, schedule=schedule, **options)


def catch(context: RankContext, schedule: Schedule, options: Mapping[str, Any]) -> tuple[str, int, Named]:
    """What a rank sees, after how many steps, and the weights after it has gone on with the other batches."""
    said = ""
    with make(context, schedule, on_nan="raise", **options) as pipe:
        for batch in batches_with(math.nan):
            try:
                pipe.train_step(*batch)
            except NotFiniteError as error:
                said, num_steps = str(error), pipe.num_steps
        return said, num_steps, weights_of(pipe.modules)
