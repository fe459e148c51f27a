"""A decoder-only GPT, whole or cut into stages.

stage 0: tokens -> Embedding -> layers 0, 1, … -> activation
stage s: activation          -> layers …       -> activation
last:    activation          -> layers …       -> Head -> logits

Parameters are named by global layer (`layers.7.attention.output.weight`, whichever stage holds layer 7), so the state
dicts of the stages together are the state dict of the whole model.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from stagewright.models.build import check_cut, check_dtype, count_parameters
from stagewright.models.cache import KeyValueCache
from stagewright.models.config import GPTConfig
from stagewright.models.cut import Cut, Part, cut_evenly, parts_of_transformer
from stagewright.models.gpt_layers import Embedding, Head, Layer
from stagewright.models.initialise import initialise, tie


class GPTStage(nn.Module):
    """A contiguous piece of the GPT, whose part 0 is the embedding, part 1 layer 0, …, and whose last part is the head.

    The first stage takes int64 tokens [batch, sequence], every other an activation [batch, sequence, hidden]. The last
    stage returns logits [batch, sequence, vocab], every other an activation.
    """

    def __init__(self, config: GPTConfig, parts: range) -> None:
        super().__init__()
        layers = [part - 1 for part in parts if 1 <= part <= config.num_layers]
        self.config = config
        self.microbatch_seed: int | None = None
        self.embedding = Embedding(config) if 0 in parts else None
        self.layers = nn.ModuleDict({str(layer): Layer(config, layer) for layer in layers})
        self.head = Head(config) if config.num_layers + 1 in parts else None

    def seed_microbatch(self, seed: int) -> None:
        """Let the dropout of the forwards that follow depend on `seed` and the global layer alone.

        Called with a number that identifies the step and the microbatch, not the stage, the masks are the same however
        the model is cut, and a repeated forward repeats them. Such a forward reseeds torch's global generators. If
        this is never called, dropout takes its numbers from wherever those generators stand.
        """
        self.microbatch_seed = seed

    def global_name(self, name: str) -> str:
        """What a parameter of this stage is called in the whole model: the same, for layers have their global index."""
        return name

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


@dataclass(frozen=True)
class GPT:
    """A GPT as a chain of embedding, layers and head; a `CuttableModel`."""

    config: GPTConfig

    @property
    def parts(self) -> tuple[Part, ...]:
        """Embedding, layers, head."""
        return parts_of_transformer(self.config.num_layers)

    def build(
        self, parts: range, *, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> GPTStage:
        """Build some parts; the same seed gives them the same parameters, bit for bit, in any cut."""
        check_dtype(dtype)
        with torch.device("meta"):
            module = GPTStage(self.config, parts)
        module = module.to(dtype or torch.float32).to_empty(device=device)
        initialise(module, seed=seed, num_layers=self.config.num_layers)
        if self.config.tied and module.head is not None:
            tie(module.head.projection, module.embedding.tokens if module.embedding is not None else None, seed)
        return module

    def num_parameters(self) -> tuple[int, ...]:
        """How many parameters each part has."""
        indices = range(len(self.parts))
        with torch.device("meta"):
            return tuple(count_parameters(GPTStage(self.config, range(part, part + 1))) for part in indices)


def build_gpt_stage(
    config: GPTConfig,
    stage: int,
    num_stages: int,
    *,
    cut: Cut | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> GPTStage:
    """Build one stage of the GPT with its initial parameters.

    The same seed gives the same parameters, bit for bit, for every cut (see `initialise`), by default the even one;
    torch's global random state is untouched and no other stage's memory is ever taken.

    Raises `ValueError` for a stage that does not exist, more stages than layers, or a dtype without fractions.
    """
    model = GPT(config)
    cut = cut or cut_evenly(model.parts, num_stages)
    if cut.num_stages != num_stages:
        raise ValueError(
            f"a cut has as many stages as the schedule: got a cut into {cut.num_stages} for {num_stages} stages; "
            f"make it for {num_stages}"
        )
    check_cut(model, cut)
    return model.build(cut.parts_of_stage(stage), seed=seed, device=device, dtype=dtype)


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
