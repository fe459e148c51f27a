"""The parts of a GPT: embedding, layer, head."""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from stagewright.models.cache import KeyValueCache
from stagewright.models.config import GPTConfig
from stagewright.models.initialise import ResidualProjection, derive_seed


class Embedding(nn.Module):
    """Tokens [batch, sequence] to activation [batch, sequence, hidden]: token plus learned position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.sequence_length, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, microbatch_seed: int | None, num_past: int = 0) -> Tensor:
        num_tokens, num_positions = num_past + tokens.size(-1), self.positions.num_embeddings
        if num_tokens > num_positions:
            raise ValueError(
                f"a sequence may be as long as the model has positions: got {num_tokens} tokens for "
                f"{num_positions} positions; shorten the sequence or build with sequence_length={num_tokens}"
            )
        position = torch.arange(num_past, num_tokens, device=tokens.device)
        seed_dropout(microbatch_seed, "embedding", tokens.device)
        activation: Tensor = self.dropout(self.tokens(tokens) + self.positions(position))
        return activation


class Attention(nn.Module):
    """Causal self-attention: each position sees itself and what came before it, in earlier pieces too with a cache."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_heads
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = ResidualProjection(config.hidden_size, config.hidden_size)

    def forward(self, activation: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        query, key, value = rearrange(
            self.query_key_value(activation),
            "batch sequence (three head width) -> three batch head sequence width",
            three=3,
            head=self.num_heads,
        )
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        mask = mask_after(key.size(-2) - query.size(-2), query)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        output: Tensor = self.output(rearrange(attended, "batch head sequence width -> batch sequence (head width)"))
        return output


class MLP(nn.Module):
    """Each position on its own: widen four times, GELU, narrow."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.widen = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.narrow = ResidualProjection(4 * config.hidden_size, config.hidden_size)

    def forward(self, activation: Tensor) -> Tensor:
        output: Tensor = self.narrow(functional.gelu(self.widen(activation)))
        return output


class Layer(nn.Module):
    """One pre-norm transformer layer; it knows its global index, which names its dropout."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config, layer)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, activation: Tensor, microbatch_seed: int | None, cache: KeyValueCache | None = None) -> Tensor:
        # The seed is an argument, not state, so that a layer recomputed later (torch.utils.checkpoint) still draws
        # the masks of its own microbatch although the stage has moved on to another.
        seed_dropout(microbatch_seed, f"layers.{self.layer}", activation.device)
        attended = activation + self.dropout(self.attention(self.attention_norm(activation), cache))
        output: Tensor = attended + self.dropout(self.mlp(self.mlp_norm(attended)))
        return output


class Head(nn.Module):
    """Activation [batch, sequence, hidden] to logits [batch, sequence, vocab]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.projection = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, activation: Tensor) -> Tensor:
        logits: Tensor = self.projection(self.norm(activation))
        return logits


def mask_after(num_past: int, query: Tensor) -> Tensor | None:
    """Which keys each query sees, [query, key], where `num_past` tokens came before; None where none did.

    torch's own causal mask would align the first query with the first key, however many keys are older.
    """
    if num_past == 0:
        return None
    num_queries = query.size(-2)
    return torch.ones(num_queries, num_past + num_queries, dtype=torch.bool, device=query.device).tril(num_past)


def seed_dropout(microbatch_seed: int | None, name: str, device: torch.device) -> None:
    """Seed the device's generator for the dropout of the part called `name`; without a microbatch's seed, do nothing.

    `torch.manual_seed` would seed every device there is, which takes longer than a small layer.
    """
    if microbatch_seed is None:
        return
    number = derive_seed(microbatch_seed, name)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)
