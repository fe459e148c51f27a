"""A rank of a pipeline whose stages sleep: prints, on the first rank, the bubble of its least disturbed step."""

import sys

import torch

from stagewright.bench.stages import SleepStage
from stagewright.engine import Pipeline, from_environment

FORWARD, BACKWARD = 0.04, 0.08
NUM_MICROBATCHES = 4
_NUM_STEPS = 8

if __name__ == "__main__":
    with (
        from_environment() as context,
        Pipeline(
            lambda stage: SleepStage(FORWARD, BACKWARD),
            schedule="1f1b",
            num_microbatches=NUM_MICROBATCHES,
            loss_fn=torch.nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            transport=context.transport,
        ) as pipe,
    ):
        bubbles = []
        for _ in range(_NUM_STEPS):
            pipe.train_step(torch.zeros(8, 8), torch.zeros(8, 8))
            bubbles.append(pipe.trace().bubble_fraction)
        if context.rank == 0:
            sys.stdout.write(f"{min(bubbles[1:])}\n")
