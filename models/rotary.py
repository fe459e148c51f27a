"""Rotary position embedding: positions as rotations of the queries and keys (Su et al., "RoFormer", 2021)."""

import torch
from torch import Tensor

from stagewright.models.initialise import Constants


class Rotary(Constants):
    """Rotates pairs of numbers by angles that grow with the position, each pair at a frequency of its own.

    Pair i of a head of some width is numbers i and i + width/2, its frequency theta ** (-2i / width), as in Llama.
    """

    frequencies: Tensor

    def __init__(self, width: int, theta: float) -> None:
        super().__init__()
        self.width = width
        self.theta = theta
        self.register_buffer("frequencies", torch.empty(width // 2, dtype=torch.float32), persistent=False)

    def reset_parameters(self) -> None:
        """Compute the frequencies, in float32 as the models that others have trained did."""
        exponents = torch.arange(0, self.width, 2, dtype=torch.float32) / self.width
        self.frequencies.copy_(1.0 / self.theta**exponents)

    def forward(self, heads: Tensor) -> Tensor:
        """Rotate queries or keys [batch, head, sequence, width], the first of the sequence at position 0."""
        positions = torch.arange(heads.size(-2), device=heads.device, dtype=self.frequencies.dtype)
        angles = torch.outer(positions, self.frequencies)
        cosine, sine = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
