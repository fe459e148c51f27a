"""A small language model with the methods and flags that Megatron-LM's trainers expect, and its data."""

from collections.abc import Iterator
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, LENGTH, ROWS = 11, 6, 5, 2
SHAPE = {"seq_length": LENGTH, "micro_batch_size": ROWS}


class Toy(nn.Module):
    """One chunk of a small language model, with the methods and flags of Megatron-LM's GPTModel."""

    def __init__(self, stage: int, num_stages: int, config: Any = None) -> None:
        super().__init__()
        self.pre_process, self.post_process = stage == 0, stage == num_stages - 1
        self.config = config
        self.input_tensor: Tensor | None = None
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if self.pre_process else None
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.output_layer = nn.Linear(WIDTH, VOCABULARY, bias=False) if self.post_process else None
        self.double()
        generator = torch.Generator().manual_seed(stage)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        (self.input_tensor,) = input_tensor

    def forward(self, tokens: Tensor | None, labels: Tensor | None) -> Tensor:
        """What goes to the next stage; on the last stage each token's loss."""
        hidden = self.embedding(tokens) if self.embedding is not None else self.input_tensor
        assert hidden is not None
        hidden = hidden + self.block(hidden)
        if self.output_layer is None:
            return hidden
        assert labels is not None
        return functional.cross_entropy(self.output_layer(hidden).transpose(1, 2), labels, reduction="none")


def microbatch_of(index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and loss mask of a microbatch, counted on from batch to batch; every third mask is empty."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    mask = torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64) < 0.7
    return tokens[:, :-1], tokens[:, 1:], mask & (index % 3 != 1)


def iterator_for(chunk: Toy) -> Iterator[Any] | None:
    """The data, on the stages that read it."""
    return map(microbatch_of, count()) if chunk.pre_process or chunk.post_process else None


def mean(mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The plain mean over all tokens of a microbatch."""
    return losses.mean(), {"lm loss": losses.mean()}


def mean_of_masked(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The sum over the tokens that count, and their number."""
    total = (losses * mask).sum()
    return total, mask.sum(), {"lm loss": torch.stack([total, mask.sum()])}


def forward_step(loss_func: Any, data_iterator: Iterator[Any] | None, model: Toy) -> tuple[Tensor, Any]:
    """Megatron-LM's forward_step_func; only the first and the last stage read data."""
    tokens, labels, mask = next(data_iterator) if data_iterator is not None else (None, None, None)
    return model(tokens, labels), partial(loss_func, mask)


def config(**options: Any) -> SimpleNamespace:
    """Megatron-LM's model config, in which only what is given is set."""
    return SimpleNamespace(
        **{"calculate_per_token_loss": False, "grad_scale_func": None, "finalize_model_grads_func": None} | options
    )
