"""Stages for tests: the same numbers for a stage whoever builds it."""

from collections.abc import Callable, Sequence

import torch
from torch import nn


def build(kind: Callable[[], nn.Module], stage: int) -> nn.Module:
    """A module in float64 whose weights depend on the stage alone."""
    with torch.random.fork_rng():
        torch.manual_seed(stage)
        return kind().double()


class Stages:
    """stage -> module: one kind for all stages, or one kind each.

    Args:
        kinds: what makes the stages, in order; the last one serves for all that follow.
    """

    def __init__(self, *kinds: Callable[[], nn.Module]) -> None:
        self._kinds: Sequence[Callable[[], nn.Module]] = kinds

    def __call__(self, stage: int) -> nn.Module:
        return build(self._kinds[min(stage, len(self._kinds) - 1)], stage)
