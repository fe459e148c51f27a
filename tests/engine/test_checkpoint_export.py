"""Export: the state dict of the model without stages, out of a pipeline, a checkpoint or a file, and into one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import Shape, config_of, make_pipeline, make_tokens, round_trip
from launching import Kind, launch_on
from torch import Tensor

from stagewright.engine import (
    Checkpoints,
    RankContext,
    full_state_dict,
    read_state_dict,
    write_state_dict,
)
from stagewright.models import build_gpt, token_loss

SHAPES = [
    Shape("1f1b", 2),
    Shape("zbv", 2, model={"tied": True}),
    Shape("dualpipe", 2),
    Shape("2bw", 2),
    Shape("1f1b", 2, num_replicas=2),
    Shape("1f1b", 2, dtype=torch.bfloat16, pipeline={"master_weights": True}),
]


def export(context: RankContext, shape: Shape, folder: Path) -> tuple[dict[str, Tensor], float, int]:
    """The whole model after some steps, and its loss."""
    with make_pipeline(context, shape) as pipe:
        for step in range(2):
            pipe.train_step(*make_tokens(step))
        state = full_state_dict(pipe)
        Checkpoints(folder, pipe).save()
        loss = pipe.eval_step(*make_tokens(9))
        assert loss is not None
        return state, loss.item(), pipe.rank


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.schedule}x{shape.num_replicas}-{shape.dtype}")
def test_a_pipeline_gives_the_state_dict_of_the_model_without_stages(shape: Shape, tmp_path: Path) -> None:
    """And so do a checkpoint and a file."""
    results = launch_on("threads", export, shape.num_ranks * shape.num_replicas, (shape, tmp_path))
    model = build_gpt(config_of(shape), seed=3, dtype=shape.dtype)
    exported = [state for state, _, rank in results if rank == 0]
    assert all(not state for state, _, rank in results if rank)
    for state in (*exported, read_state_dict(tmp_path)):
        assert state.keys() == model.state_dict().keys()
        model.load_state_dict(state)
        x, y = make_tokens(9)
        tolerance = 1e-12 if shape.dtype == torch.float64 else 1e-2
        assert token_loss(model.eval()(x), y).item() == pytest.approx(results[0][1], rel=tolerance)
    write_state_dict(tmp_path / "model.safetensors", exported[0])
    again = read_state_dict(tmp_path / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in exported[0].items())


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_model_without_stages_goes_into_a_pipeline_and_out_again(kind: Kind) -> None:
    shape = Shape("interleaved", 2, options={"num_chunks": 2})
    model = build_gpt(config_of(shape), seed=77, dtype=torch.float64).eval()
    (exported, loss, _), _ = launch_on(kind, round_trip, 2, (shape, model.state_dict()))
    x, y = make_tokens(9)
    assert loss == pytest.approx(token_loss(model(x), y).item(), rel=1e-12)
    assert exported.keys() == model.state_dict().keys()
    assert all(torch.equal(exported[name], value) for name, value in model.state_dict().items())


def test_weights_may_come_in_another_type_and_masters_follow_them() -> None:
    shape = Shape("2bw", 2, dtype=torch.bfloat16, pipeline={"master_weights": True})
    model = build_gpt(config_of(shape), seed=77, dtype=torch.float32)
    (exported, _, _), _ = launch_on("threads", round_trip, 2, (shape, model.state_dict()))
    assert all(torch.equal(exported[name], value.bfloat16()) for name, value in model.state_dict().items())


def without(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if not name.startswith("layers.3.mlp")}


def reshaped(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state | {"head.norm.bias": torch.zeros(9)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without, r"the state dict lacks layers\.3\.mlp\..* and 3 more, which stage 1 holds"),
        (reshaped, r"head\.norm\.bias is \[9\] in the state dict: it is \[8\]"),
    ],
)
def test_what_does_not_fit_is_refused(change: Any, message: str) -> None:
    shape = Shape("1f1b", 2)
    state = change(build_gpt(config_of(shape), dtype=torch.float64).state_dict())
    with pytest.raises(ValueError, match=message):
        launch_on("threads", round_trip, 2, (shape, state))
