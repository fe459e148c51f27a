"""What attention has to remember of the tokens before, so that text grows without reading all of it again."""

import torch
from torch import Tensor


class KeyValueCache:
    """The keys and values of the tokens that one microbatch has read, layer by layer.

    Handed to the stages of a GPT with one piece of the sequences after the other, it makes each piece see those before
    it, and its positions go on where they ended. Layers have their global index, so one cache serves all stages of a
    rank, or a whole model; what it saves grows with the sequence. A fresh one starts a new sequence.
    """

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def num_tokens(self, layer: int) -> int:
        """How many tokens of each sequence a layer has read."""
        return self._layers[layer][0].size(-2) if layer in self._layers else 0

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append what a layer computed for new tokens, and return its keys and values of all tokens, old ones first.

        All tensors are [batch, head, sequence, width]. Raises `ValueError` for another number of sequences than the
        cache holds.
        """
        if layer in self._layers:
            old_key, old_value = self._layers[layer]
            if len(old_key) != len(key):
                raise ValueError(
                    f"a cache belongs to the sequences of one microbatch: got {len(key)} sequences for a cache of "
                    f"{len(old_key)}; give every microbatch a cache of its own"
                )
            key, value = torch.cat([old_key, key], dim=-2), torch.cat([old_value, value], dim=-2)
        self._layers[layer] = key, value
        return key, value
