"""A decoder-only GPT, whole or cut into stages.

stage 0: tokens -> Embedding -> layers 0, 1, … -> activation
stage s: activation          -> layers …       -> activation
last:    activation          -> layers …       -> Head -> logits

Parameters are named by global layer (`layers.7.attention.output.weight`, whichever stage holds layer 7), so the state
dicts of the stages together are the state dict of the whole model.
"""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from stagewright.models.cache import KeyValueCache
from stagewright.models.config import GPTConfig
from stagewright.models.cut import layers_of_stage
from stagewright.models.initialise import ResidualProjection, derive_seed, initialise, tie


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


class GPTStage(nn.Module):
    """A contiguous piece of the GPT.

    The first stage takes int64 tokens [batch, sequence], every other an activation [batch, sequence, hidden]. The last
    stage returns logits [batch, sequence, vocab], every other an activation.
    """

    def __init__(self, config: GPTConfig, stage: int, num_stages: int) -> None:
        super().__init__()
        layers = layers_of_stage(config.num_layers, num_stages, stage)
        self.config = config
        self.microbatch_seed: int | None = None
        self.embedding = Embedding(config) if stage == 0 else None
        self.layers = nn.ModuleDict({str(layer): Layer(config, layer) for layer in layers})
        self.head = Head(config) if stage == num_stages - 1 else None

    def seed_microbatch(self, seed: int) -> None:
        """Let the dropout of the forwards that follow depend on `seed` and the global layer alone.

        Called with a number that identifies the step and the microbatch, not the stage, the masks are the same however
        the model is cut, and a repeated forward repeats them. Such a forward reseeds torch's global generators. If
        this is never called, dropout takes its numbers from wherever those generators stand.
        """
        self.microbatch_seed = seed

    def forward(self, incoming: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Compute the stage's part of one microbatch.

        With a cache, `incoming` continues the sequences whose earlier pieces went through this stage with the same
        cache, and what comes out is, for these tokens, what the sequences would give as a whole. Raises `ValueError`
        for a sequence that grows longer than the model has positions, and for a cache in training mode.
        """
        if cache is not None and self.training:
            raise ValueError(
                "a cache is for generation: a forward repeated in training would append to it twice; "
                "call eval() first, or leave the cache out"
            )
        drops = self.training and self.config.dropout > 0
        microbatch_seed = self.microbatch_seed if drops else None
        activation = incoming
        if self.embedding is not None:
            num_past = cache.num_tokens(0) if cache is not None else 0
            activation = self.embedding(incoming, microbatch_seed, num_past)
        for layer in self.layers.values():
            activation = layer(activation, microbatch_seed, cache)
        return activation if self.head is None else self.head(activation)


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


def build_gpt_stage(
    config: GPTConfig,
    stage: int,
    num_stages: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> GPTStage:
    """Build one stage of the GPT with its initial parameters.

    The same seed gives the same parameters, bit for bit, for every number of stages (see `initialise`); torch's global
    random state is untouched and no other stage's memory is ever taken.

    Raises `ValueError` for a stage that does not exist, more stages than layers, or a dtype without fractions.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"parameters need a floating-point dtype: got {dtype}; use torch.float32 or torch.bfloat16")
    with torch.device("meta"):
        module = GPTStage(config, stage, num_stages)
    module = module.to(dtype).to_empty(device=device)
    initialise(module, seed=seed, num_layers=config.num_layers)
    if config.tied and module.head is not None:
        tie(module.head.projection, module.embedding.tokens if module.embedding is not None else None, seed)
    return module


def build_gpt(
    config: GPTConfig,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> GPTStage:
    """Build the whole GPT: the single stage of a cut into one."""
    return build_gpt_stage(config, 0, 1, seed=seed, device=device, dtype=dtype)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per token, computed in float32 or better.

    `logits` are [batch, sequence, vocab], `targets` the int64 tokens [batch, sequence] that should have been
    predicted; the result is a scalar. Raises `ValueError` when the two do not cover the same tokens.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"every token predicted needs one target: got logits {list(logits.shape)} for targets "
            f"{list(targets.shape)}; pass targets {list(logits.shape[:-1])}"
        )
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(
        rearrange(precise, "batch sequence vocab -> (batch sequence) vocab"),
        rearrange(targets, "batch sequence -> (batch sequence)"),
    )
