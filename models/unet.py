"""A U-Net (Ronneberger et al. 2015): what goes down one side is needed again on the way up the other.

The skips lie far apart, so they travel along the chain: what crosses is a dict with the activation and the list of the
skips that somebody further on still waits for, the newest last.

    image -> down.0 -> down.1 -> middle -> up.1 -> up.0 -> head -> output
               |         '------ skip -----'        |
               '------------- skip -----------------'
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from stagewright.models.chain import Chain
from stagewright.models.config import check_sizes
from stagewright.models.cut import Part


class Crossing(TypedDict):
    """What a part of the U-Net hands to the next one."""

    activation: Tensor
    skips: list[Tensor]


@dataclass(frozen=True)
class UNetConfig:
    """The sizes of a U-Net: `depth` levels, each half as high and wide as the one above and with twice the channels.

    Images are [batch, image_channels, height, width], height and width multiples of 2 ** depth. `groups` are those of
    the norms, which unlike a batch norm treat every image by itself.
    Raises `TypeError` for a size that is not an integer and `ValueError` for one that is too small.
    """

    image_channels: int = 1
    output_channels: int = 2
    channels: int = 8
    depth: int = 2
    groups: int = 4

    def __post_init__(self) -> None:
        check_sizes(self, ("image_channels", "output_channels", "channels", "depth", "groups"))
        if self.channels % self.groups:
            raise ValueError(
                f"groups must divide channels: got {self.groups} groups for {self.channels} channels; "
                f"use {self.groups * -(-self.channels // self.groups)} channels"
            )


class Block(nn.Sequential):
    """Two convolutions, each with a norm before its activation."""

    def __init__(self, incoming: int, outgoing: int, groups: int) -> None:
        layers: list[nn.Module] = []
        for channels in (incoming, outgoing):
            layers += [nn.Conv2d(channels, outgoing, 3, padding=1), nn.GroupNorm(groups, outgoing), nn.SiLU()]
        super().__init__(*layers)


class Down(nn.Module):
    """One level down; what it computes before that is a skip."""

    def __init__(self, incoming: int, outgoing: int, groups: int) -> None:
        super().__init__()
        self.block = Block(incoming, outgoing, groups)

    def forward(self, incoming: Tensor | Crossing) -> Crossing:
        activation, skips = (
            (incoming, []) if isinstance(incoming, Tensor) else (incoming["activation"], incoming["skips"])
        )
        activation = self.block(activation)
        return {"activation": functional.max_pool2d(activation, 2), "skips": [*skips, activation]}


class Middle(nn.Module):
    """The bottom."""

    def __init__(self, incoming: int, outgoing: int, groups: int) -> None:
        super().__init__()
        self.block = Block(incoming, outgoing, groups)

    def forward(self, incoming: Crossing) -> Crossing:
        return {"activation": self.block(incoming["activation"]), "skips": incoming["skips"]}


class Up(nn.Module):
    """One level up, joined by the skip from there."""

    def __init__(self, incoming: int, outgoing: int, groups: int) -> None:
        super().__init__()
        self.rise = nn.ConvTranspose2d(incoming, outgoing, 2, stride=2)
        self.block = Block(2 * outgoing, outgoing, groups)

    def forward(self, incoming: Crossing) -> Crossing:
        *skips, skip = incoming["skips"]
        return {"activation": self.block(torch.cat([skip, self.rise(incoming["activation"])], dim=1)), "skips": skips}


class Head(nn.Module):
    """To the channels of the output."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(incoming, outgoing, 1)

    def forward(self, incoming: Crossing) -> Tensor:
        output: Tensor = self.projection(incoming["activation"])
        return output


def unet(config: UNetConfig) -> Chain:
    """A U-Net as a chain; its modules draw their parameters as their classes do, from the seed and their names."""
    with torch.device("meta"):
        names = list(build_parts(config))
    return Chain(tuple(map(Part, names)), partial(build_parts, config))


def build_parts(config: UNetConfig) -> Mapping[str, nn.Module]:
    """All parts by name, in order."""
    widths = [config.channels * 2**level for level in range(config.depth + 1)]
    levels = range(config.depth)
    down = {
        f"down.{level}": Down(widths[level - 1] if level else config.image_channels, widths[level], config.groups)
        for level in levels
    }
    middle = Middle(widths[-2], widths[-1], config.groups)
    up = {f"up.{level}": Up(widths[level + 1], widths[level], config.groups) for level in reversed(levels)}
    return {**down, "middle": middle, **up, "head": Head(widths[0], config.output_channels)}
