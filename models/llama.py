"""A decoder in the style of Llama (Touvron et al. 2023): RMSNorm, rotary positions, SwiGLU, grouped-query attention.

It is a chain of `embedding`, `layers.0`, `layers.1`, …, `head`; only an activation [batch, sequence, hidden] crosses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from stagewright.models.chain import Chain
from stagewright.models.config import check_heads, check_sizes
from stagewright.models.cut import parts_of_transformer
from stagewright.models.initialise import ResidualProjection, initialise, tie
from stagewright.models.rotary import Rotary


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama-style decoder.

    `num_key_value_heads` query heads share each pair of key and value (Ainslie et al., "GQA", 2023): as many as
    `num_heads` is multi-head, 1 is multi-query attention. `intermediate_size` is the width inside the MLP. `tied`
    makes the head's projection and the token embedding one weight, as in `GPTConfig`.
    Raises `TypeError` for a size that is not an integer and `ValueError` for sizes that do not fit together.
    """

    vocab_size: int = 256
    num_layers: int = 4
    hidden_size: int = 128
    num_heads: int = 4
    num_key_value_heads: int = 2
    intermediate_size: int = 352
    theta: float = 10_000.0
    epsilon: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        check_sizes(
            self,
            ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_key_value_heads", "intermediate_size"),
        )
        check_heads(self.num_heads, self.hidden_size)
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads must divide num_heads: got {self.num_key_value_heads} for {self.num_heads} "
                f"heads; use {self.num_heads}, or 1"
            )
        if self.hidden_size // self.num_heads % 2:
            raise ValueError(
                f"rotary positions turn pairs of numbers, so a head's width is even: got {self.hidden_size} / "
                f"{self.num_heads} = {self.hidden_size // self.num_heads}; use a hidden size of "
                f"{self.hidden_size + self.num_heads}"
            )


class Embedding(nn.Module):
    """Tokens [batch, sequence] to activation [batch, sequence, hidden]; positions are the layers' affair."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        activation: Tensor = self.tokens(tokens)
        return activation


class Attention(nn.Module):
    """Causal self-attention whose query heads share keys and values in groups."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = config.hidden_size // config.num_heads
        self.width = width
        self.query = nn.Linear(config.hidden_size, config.num_heads * width, bias=False)
        self.key = nn.Linear(config.hidden_size, config.num_key_value_heads * width, bias=False)
        self.value = nn.Linear(config.hidden_size, config.num_key_value_heads * width, bias=False)
        self.rotary = Rotary(width, config.theta)
        self.output = ResidualProjection(config.num_heads * width, config.hidden_size, bias=False)

    def forward(self, activation: Tensor) -> Tensor:
        query, key, value = (
            rearrange(projected, "batch sequence (head width) -> batch head sequence width", width=self.width)
            for projected in (self.query(activation), self.key(activation), self.value(activation))
        )
        attended = functional.scaled_dot_product_attention(
            self.rotary(query), self.rotary(key), value, is_causal=True, enable_gqa=True
        )
        output: Tensor = self.output(rearrange(attended, "batch head sequence width -> batch sequence (head width)"))
        return output


class MLP(nn.Module):
    """SwiGLU: a gated widening, then narrow (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.widen = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.narrow = ResidualProjection(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, activation: Tensor) -> Tensor:
        output: Tensor = self.narrow(functional.silu(self.gate(activation)) * self.widen(activation))
        return output


class Layer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.epsilon)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.epsilon)
        self.mlp = MLP(config)

    def forward(self, activation: Tensor) -> Tensor:
        attended = activation + self.attention(self.attention_norm(activation))
        output: Tensor = attended + self.mlp(self.mlp_norm(attended))
        return output


class Head(nn.Module):
    """Activation [batch, sequence, hidden] to logits [batch, sequence, vocab]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.epsilon)
        self.projection = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, activation: Tensor) -> Tensor:
        logits: Tensor = self.projection(self.norm(activation))
        return logits


def llama(config: LlamaConfig) -> Chain:
    """A Llama-style decoder as a chain; its initial parameters are drawn as the GPT's are."""
    return Chain(
        parts_of_transformer(config.num_layers), partial(build_parts, config), partial(initialise_parts, config)
    )


def build_parts(config: LlamaConfig) -> Mapping[str, nn.Module]:
    """All parts by name."""
    layers = {f"layers.{layer}": Layer(config) for layer in range(config.num_layers)}
    return {"embedding": Embedding(config), **layers, "head": Head(config)}


def initialise_parts(config: LlamaConfig, stage: nn.Module, seed: int, names: list[str]) -> None:
    """Fill a stage; a tied head takes the embedding's numbers."""
    initialise(stage, seed=seed, num_layers=config.num_layers)
    parts = dict(stage.named_children())
    if config.tied and "head" in parts:
        embedding = parts["embedding"].get_submodule("tokens") if "embedding" in parts else None
        assert embedding is None or isinstance(embedding, nn.Embedding)
        projection = parts["head"].get_submodule("projection")
        assert isinstance(projection, nn.Linear)
        tie(projection, embedding, seed)
