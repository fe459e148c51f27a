"""Trainings with stages that are spread over several ranks, saved and gone on with, with other shards or with none."""

from pathlib import Path
from typing import Any

import torch
from data_parallel import share_of
from plain import make_batch, squared_error
from spread import Build, whole
from torch import Tensor

from stagewright.engine import (
    Checkpoints,
    Pipeline,
    RankContext,
    full_state_dict,
    load_full_state_dict,
    make_mesh,
    read_state_dict,
)

Trained = tuple[list[float], dict[str, Tensor]]


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(named), lr=0.01)


def train_saved(
    context: RankContext, sizes: dict[str, int], kind: str, folder: Path, stop: int, saves: bool
) -> Trained:
    """Go on from the newest checkpoint in a folder; the losses, and all weights of this rank's stages in the end.

    Args:
        context: of the rank.
        sizes: of the mesh.
        kind: of the stages, see ``spread.Build``.
        folder: of the checkpoints.
        stop: the number of steps in all.
        saves: whether to save in the end, in the background.
    """
    torch.set_num_threads(1)
    mesh: Any = make_mesh(**sizes, context=context)
    parts = (9,) if sizes.get("dp", 1) == 1 else (5, 4)
    with (
        Pipeline(
            Build(mesh, kind),
            schedule="1f1b",
            num_microbatches=2,
            mesh=mesh,
            loss_fn=squared_error,
            optimizer=adam,
            share_loss=True,
        ) as pipe,
        Checkpoints(folder, pipe, asynchronous=True) as checkpoints,
    ):
        losses = []
        for step in range(checkpoints.load() or 0, stop):
            loss = pipe.train_step(*share_of(make_batch(9, step), parts, pipe.replica))
            assert loss is not None
            losses.append(loss.item())
        if saves:
            checkpoints.save()
        weights = {
            f"stage{stage}.{name}": whole(parameter.detach()).clone()
            for stage, module in pipe.modules.items()
            for name, parameter in module.named_parameters()
        }
    return losses, weights


def move_weights(context: RankContext, sizes: dict[str, int], kind: str, folder: Path) -> None:
    """Weights are found in a checkpoint, taken in by stages that had others, and given out whole."""
    mesh: Any = make_mesh(**sizes, context=context)
    with Pipeline(
        Build(mesh, kind), schedule="gpipe", num_microbatches=2, mesh=mesh, loss_fn=squared_error, optimizer=adam
    ) as pipe:
        saved = read_state_dict(folder)
        load_full_state_dict(pipe, saved)
        exported = full_state_dict(pipe)
        assert exported.keys() == (saved.keys() if pipe.rank == 0 else set())
        for name, value in exported.items():
            assert torch.equal(value, saved[name]), name
