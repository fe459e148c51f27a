"""Small trainings that are saved and resumed: a GPT of four layers in float64, with all that an update depends on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from launching import Kind, launch_on
from torch import Tensor

from stagewright.engine import Checkpoints, Pipeline, RankContext, full_state_dict, load_full_state_dict, make_mesh
from stagewright.models import TIED_WEIGHTS, GPTConfig, build_gpt_stage, token_loss
from stagewright.schedules import create

ROWS = 8


@dataclass(frozen=True)
class Shape:
    """How the training runs.

    Args:
        schedule: its name.
        num_ranks, num_microbatches, options: of the schedule.
        num_replicas: each has its share of the batch and of the microbatches.
        model, pipeline: settings of the GPT and of the Pipeline.
        optimizer: makes it.
        dtype: of the weights.
    """

    schedule: str = "1f1b"
    num_ranks: int = 2
    num_microbatches: int = 4
    num_replicas: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Any = torch.optim.AdamW
    dtype: torch.dtype = torch.float64


def make_tokens(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a batch."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(11, (ROWS, 5), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def config_of(shape: Shape) -> GPTConfig:
    settings = {"num_layers": 4, "hidden_size": 8, "num_heads": 2, "sequence_length": 4, "vocab_size": 11}
    return GPTConfig(**{**settings, **shape.model})


def make_optimizer(shape: Shape, named: Any) -> torch.optim.Optimizer:
    """Groups: norms and biases are not decayed, and positions, which the first stage alone has, learn more slowly."""
    pairs = list(named)
    slow = [pair for pair in pairs if "positions" in pair[0]]
    free = [pair for pair in pairs if "norm" in pair[0] or "bias" in pair[0]]
    decayed = [pair for pair in pairs if pair[0] not in dict(slow + free)]
    groups = [
        {"params": slow, "weight_decay": 0.1, "lr": 0.005},
        {"params": decayed, "weight_decay": 0.1},
        {"params": free, "weight_decay": 0.0, "lr": 0.02},
    ]
    optimizer: torch.optim.Optimizer = shape.optimizer([group for group in groups if group["params"]], lr=0.01)
    return optimizer


def make_pipeline(context: RankContext, shape: Shape, **options: Any) -> Pipeline:
    torch.set_num_threads(1)
    schedule = create(
        shape.schedule,
        num_ranks=shape.num_ranks,
        num_microbatches=shape.num_microbatches // shape.num_replicas,
        **shape.options,
    )
    config = config_of(shape)
    tied = config.tied and schedule.num_stages > 1
    replicated = shape.num_replicas > 1
    return Pipeline(
        partial(build_gpt_stage, config, num_stages=schedule.num_stages, seed=3, dtype=shape.dtype),
        schedule=schedule,
        loss_fn=token_loss,
        optimizer=partial(make_optimizer, shape),
        transport=None if replicated else context.transport,
        mesh=make_mesh(pp=shape.num_ranks, dp=shape.num_replicas, context=context) if replicated else None,
        seed=5,
        share_loss=True,
        tied=[TIED_WEIGHTS] if tied else [],
        **{**shape.pipeline, **options},
    )


@dataclass
class Loader:
    """Where a training is in its data."""

    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]

    def take(self, pipe: Pipeline) -> tuple[Tensor, Tensor]:
        """This replica's rows of the next batch."""
        x, y = make_tokens(self.step)
        self.step += 1
        share = ROWS // pipe.num_replicas
        rows = slice(pipe.replica * share, (pipe.replica + 1) * share)
        return x[rows], y[rows]


def train(
    context: RankContext,
    shape: Shape,
    folder: Path,
    stop: int,
    save_at: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Go on from the newest checkpoint in a folder, if there is one; the losses, and in the end the rank's weights."""
    with make_pipeline(context, shape) as pipe:
        assert pipe.optimizer is not None
        scheduler, loader = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.9), Loader()
        parts = {"scheduler": scheduler, "loader": loader}
        with Checkpoints(folder, pipe, parts=parts, **(options or {})) as checkpoints:
            checkpoints.load()
            losses = []
            while loader.step < stop:
                loss = pipe.train_step(*loader.take(pipe))
                assert loss is not None
                losses.append(loss.item())
                scheduler.step()
                if loader.step in save_at:
                    checkpoints.save()
        state = pipe.state_dict()["stages"]
        return losses, {name: value.clone() for of_stage in state.values() for name, value in of_stage.items()}


def train_on(kind: Kind, shape: Shape, *arguments: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, which all ranks know, and the weights of all ranks together."""
    results = launch_on(kind, train, shape.num_ranks * shape.num_replicas, (shape, *arguments))
    assert all(losses == results[0][0] for losses, _ in results)
    return results[0][0], {name: value for _, of_rank in results for name, value in of_rank.items()}


def round_trip(context: RankContext, shape: Shape, state: dict[str, Tensor]) -> Any:
    """A step, other weights in, their loss, weights out, and a step with them."""
    with make_pipeline(context, shape) as pipe:
        pipe.train_step(*make_tokens(0))
        load_full_state_dict(pipe, state)
        loss = pipe.eval_step(*make_tokens(9))
        assert loss is not None
        exported = full_state_dict(pipe)
        trained = pipe.train_step(*make_tokens(1))
        return exported, loss.item(), trained
