"""What cannot wait for W gets its gradient at I, and this is said once in the log."""

import logging

import pytest
import torch
from modules import Stages
from plain import make_batch, make_stage, squared_error
from torch import nn

from stagewright.engine import Pipeline


def messages(caplog: pytest.LogCaptureFixture, name: str, stage: object) -> list[str]:
    with (
        caplog.at_level(logging.INFO, logger="stagewright.engine"),
        Pipeline(stage, schedule=name, num_microbatches=4, num_chunks=2, loss_fn=squared_error) as pipe,  # type: ignore[arg-type]
    ):
        for step in range(3):
            pipe.forward_backward(*make_batch(8, step))
    return [record.getMessage() for record in caplog.records if "put off" in record.getMessage()]


def test_said_once_with_stage_and_parameters(caplog: pytest.LogCaptureFixture) -> None:
    assert messages(caplog, "interleaved-zb", make_stage) == [
        f"stage {stage}: the weight gradients of norm.weight, norm.bias cannot be put off, so they come with the input "
        "gradient"
        for stage in (1, 0)
    ]


def test_a_hooked_weight_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def hooked() -> nn.Module:
        module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        module[1].weight.register_hook(torch.clone)
        return module

    assert [
        message.split("cannot")[0] for message in messages(caplog, "interleaved-zb", Stages(hooked, nn.Identity))
    ] == ["stage 0: the weight gradients of 1.weight, 1.bias "]


def test_nothing_is_said_where_all_can_wait(caplog: pytest.LogCaptureFixture) -> None:
    def linear() -> nn.Module:
        return nn.Linear(6, 6)

    assert messages(caplog, "interleaved-zb", Stages(linear)) == []


def test_nothing_is_said_under_full_backward(caplog: pytest.LogCaptureFixture) -> None:
    assert messages(caplog, "interleaved", make_stage) == []
