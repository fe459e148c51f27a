"""The shape of a GPT, and what any model's sizes must be."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a decoder-only GPT; the defaults are a byte-level model that learns in minutes on a CPU.

    `sequence_length` is the longest sequence the model has positions for; shorter ones are welcome.
    `dropout` is the probability that an element is dropped after the embedding and after each residual branch.
    `tied` makes the head's projection and the token embedding one weight (Press and Wolf 2017). On different stages
    each has a copy, and whoever trains them must sum the gradients and keep the copies equal.
    Raises `TypeError` for a size that is not an integer and `ValueError` for sizes that do not fit together.
    """

    vocab_size: int = 256
    num_layers: int = 4
    hidden_size: int = 128
    num_heads: int = 4
    sequence_length: int = 128
    dropout: float = 0.0
    tied: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, ("vocab_size", "num_layers", "hidden_size", "num_heads", "sequence_length"))
        check_heads(self.num_heads, self.hidden_size)
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(
                f"dropout is the probability of dropping an element, at least 0 and below 1: "
                f"got {self.dropout}; pass 0 to switch it off"
            )


def check_sizes(config: object, names: Iterable[str]) -> None:
    """Raise `TypeError` for a size that is not an integer, `ValueError` for one below 1."""
    for name in names:
        size = getattr(config, name)
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name} must be an integer: got {size!r}; pass a whole number such as 4")
        if size < 1:
            raise ValueError(f"{name} must be at least 1: got {size}; pass 1 or more")


def check_heads(num_heads: int, hidden_size: int) -> None:
    """Raise `ValueError` where the heads do not divide the hidden size."""
    if hidden_size % num_heads:
        divisor = max(n for n in range(1, num_heads) if hidden_size % n == 0)
        raise ValueError(
            f"num_heads must divide hidden_size: got {num_heads} heads for a hidden size of {hidden_size}; "
            f"use {divisor} heads, or a hidden size of {-(-hidden_size // num_heads) * num_heads}"
        )
