"""A small language model whose first and last stage share one weight: the embedding is the head."""

from typing import Any, Final

import torch
from plain import make_stage
from torch import Tensor, nn
from torch.nn import functional

NUM_TOKENS: Final = 11
WIDTH: Final = 6
TIED: Final = [["embedding.weight", "head.weight"]]
# A target that counts for nothing.
NOTHING: Final = -100


def make_table() -> Tensor:
    """The one weight."""
    return torch.randn(NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


class First(nn.Module):
    """Tokens to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH, dtype=torch.float64)
        self.embedding.weight.data.copy_(make_table())
        self.block = make_stage(0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embedding(tokens))


class Last(nn.Module):
    """Vectors to logits; the head has another value than the embedding, until the two are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.block = make_stage(9)
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False, dtype=torch.float64)
        self.head.weight.data.copy_(make_table() + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


class Build:
    """stage -> module.

    Args:
        num_stages: of the model.
        tie: give both ends the very same parameter, as the plain loop does.
    """

    def __init__(self, num_stages: int, *, tie: bool = False) -> None:
        self._num_stages = num_stages
        self._first = First() if tie else None

    def __call__(self, stage: int) -> nn.Module:
        if stage == 0:
            return self._first or First()
        if stage < self._num_stages - 1:
            return make_stage(stage)
        last = Last()
        if self._first is not None:
            last.head.weight = self._first.embedding.weight
        return last


def make_text(rows: int, step: int, length: int = 5) -> tuple[Tensor, Tensor]:
    """Tokens and those to predict, some of which count for nothing; in rows 3 and 4 none counts."""
    generator = torch.Generator().manual_seed(50 + step)
    tokens = torch.randint(NUM_TOKENS, (rows, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = NOTHING
    targets[3:5] = NOTHING
    return tokens[:, :-1], targets


def sum_and_count(logits: Tensor, targets: Tensor) -> tuple[Any, ...]:
    """The sum over the tokens that count, and how many they are."""
    total = functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=NOTHING, reduction="sum")
    return total, (targets != NOTHING).sum()


def mean_over_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """What the plain loop trains on."""
    return functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=NOTHING)
