"""Stages with batch norms."""

import torch
from torch import Tensor, nn


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
