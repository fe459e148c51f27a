"""The U-Net: what crosses, and what it refuses. That any cut trains alike, `test_parity.py` holds."""

import re

import pytest
import torch

from stagewright.models import Cut, UNetConfig, build_stage, unet

CONFIG = UNetConfig(image_channels=3, output_channels=2, channels=4, depth=2, groups=2)


def test_skips_travel_until_they_are_used() -> None:
    model = unet(CONFIG)
    assert [part.name for part in model.parts] == ["down.0", "down.1", "middle", "up.1", "up.0", "head"]
    value = torch.randn(2, 3, 8, 12)
    crossings = []
    for stage in range(6):
        value = build_stage(model, Cut((1,) * 6), stage)(value)
        crossings.append(value)
    *dicts, output = crossings
    assert output.shape == (2, 2, 8, 12)
    assert [tuple(value["activation"].shape) for value in dicts] == [
        (2, 4, 4, 6),
        (2, 8, 2, 3),
        (2, 16, 2, 3),
        (2, 8, 4, 6),
        (2, 4, 8, 12),
    ]
    first, second = (2, 4, 8, 12), (2, 8, 4, 6)
    assert [[tuple(skip.shape) for skip in value["skips"]] for value in dicts] == [
        [first],
        [first, second],
        [first, second],
        [first],
        [],
    ]


def test_every_skip_matters() -> None:
    model = unet(CONFIG)
    whole = model.build(range(6))
    for level in ("0", "1"):
        whole.zero_grad()
        whole(torch.randn(2, 3, 8, 8)).sum().backward()
        block = whole.get_submodule(f"up.{level}.block.0")
        assert block.weight.grad[:, : block.in_channels // 2].abs().max() > 0


def test_channels_that_the_norms_cannot_group_are_refused() -> None:
    message = "groups must divide channels: got 3 groups for 8 channels; use 9 channels"
    with pytest.raises(ValueError, match=re.escape(message)):
        UNetConfig(channels=8, groups=3)
