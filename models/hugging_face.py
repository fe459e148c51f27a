"""Causal language models of Hugging Face transformers, built from their config and cut into stages.

A stage is the model itself with what other stages hold taken out: their layers hand on what they are given, so the
model's own forward makes attention masks, position ids and rotary embeddings on every stage, from the shape of what
arrives. What the user gives of these beside the tokens travels along the chain.

Needs the extra `hf`. Weights are random; load others with `load_state_dict`, under the names of the whole model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from stagewright.models.build import check_dtype, count_parameters, move
from stagewright.models.cut import Kind, Part
from stagewright.models.initialise import derive_seed, drawing_from
from stagewright.models.meta import materialise

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Tokens or an activation alone, or a dict of it and what goes with it.
Crossing: TypeAlias = Tensor | dict[str, Tensor]
EXTRAS: Final = ("attention_mask", "position_ids")
IGNORED_LABEL: Final = -100


@dataclass(frozen=True)
class Names:
    """What a family of models calls its parts, within the model proper; `base` is that one's own name.

    The first of `embedding` is the one that takes the tokens.
    """

    base: str
    embedding: tuple[str, ...]
    layers: str
    norm: str


_LIKE_LLAMA: Final = Names("model", ("embed_tokens",), "layers", "norm")
FAMILIES: Final[Mapping[str, Names]] = {
    "gpt2": Names("transformer", ("wte", "wpe", "drop"), "h", "ln_f"),
    "llama": _LIKE_LLAMA,
    "mistral": _LIKE_LLAMA,
    "qwen2": _LIKE_LLAMA,
    "qwen3": _LIKE_LLAMA,
}


class HandOn(nn.Module):
    """Stands where another stage has a layer."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return what comes in."""
        return hidden_states


class NoPositions(nn.Module):
    """Stands where the first stage has learned positions."""

    def forward(self, positions: Tensor) -> Tensor:
        """Return a zero, which adds nothing to the activation, whatever its shape and precision."""
        return torch.zeros((), dtype=torch.bfloat16, device=positions.device)


class HuggingFaceStage(nn.Module):
    """Some parts of a causal language model, under the names of the whole one.

    The first stage takes int64 tokens [batch, sequence], or a dict with `input_ids` and any of `attention_mask` and
    `position_ids`, as the whole model takes them; every other what the one before returned: an activation [batch,
    sequence, hidden], in a dict with the extras if there are any. The last returns logits [batch, sequence, vocab].
    The extras may also be keyword arguments, which every stage is given.
    """

    def __init__(self, base_name: str, base: nn.Module, head: nn.Module | None) -> None:
        super().__init__()
        self.base_name = base_name
        self.add_module(base_name, base)
        self.lm_head = head

    def global_name(self, name: str) -> str:
        """What a parameter of this stage is called in the whole model: the same."""
        return name

    def forward(self, incoming: Crossing, **keywords: Tensor) -> Crossing:
        """Compute the stage's part of one microbatch. Raises `ValueError` for an input that no stage knows."""
        given, extras = opened(incoming)
        main = {"inputs_embeds" if given.is_floating_point() else "input_ids": given}
        output = self.get_submodule(self.base_name)(**main, **{**extras, **keywords}, use_cache=False)
        activation: Tensor = output.last_hidden_state
        if self.lm_head is not None:
            logits: Tensor = self.lm_head(activation)
            return logits
        return {"activation": activation, **extras} if extras else activation


def opened(incoming: Crossing) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens or activation, and what comes with them."""
    if isinstance(incoming, Tensor):
        return incoming, {}
    extras = {name: value for name, value in incoming.items() if name in EXTRAS}
    others = incoming.keys() - extras.keys()
    if others not in ({"input_ids"}, {"activation"}):
        raise ValueError(
            f"a batch is input_ids, alone or with {' and '.join(EXTRAS)}: got {', '.join(sorted(incoming))}; "
            f"give labels as the target, and leave out the others"
        )
    return incoming[others.pop()], extras


@dataclass(frozen=True)
class HuggingFaceModel:
    """A causal language model of Hugging Face transformers as a chain; a `CuttableModel`.

    `config` is that of a GPT-2, Llama, Mistral, Qwen2 or Qwen3. Weights are drawn as the library draws them, each part
    with random numbers of its own, so they are the same for every cut, though not those that the library would draw
    for the whole model at once. Dropout is drawn stage by stage, so it depends on the cut.

    Raises `ValueError` for another kind of model.
    """

    config: "PretrainedConfig"

    def __post_init__(self) -> None:
        if self.config.model_type not in FAMILIES:
            raise ValueError(
                f"only models whose parts are known can be cut, {', '.join(FAMILIES)}: got {self.config.model_type!r}; "
                f"add its names to stagewright.models.hugging_face.FAMILIES"
            )

    @property
    def names(self) -> Names:
        """What the parts are called."""
        return FAMILIES[self.config.model_type]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Embedding, layers, and the head with the last norm."""
        names, num_layers = self.names, self.config.num_hidden_layers
        layers = [f"{names.base}.{names.layers}.{layer}" for layer in range(num_layers)]
        kinds: dict[str, Kind] = {f"{names.base}.{names.embedding[0]}": "embedding", **dict.fromkeys(layers, "layer")}
        return *(Part(name, kind) for name, kind in kinds.items()), Part("lm_head", "head")

    @property
    def tied(self) -> list[list[str]]:
        """The `tied=` of a `Pipeline`: head and embedding, where the config makes them one weight."""
        if not self.config.tie_word_embeddings:
            return []
        return [[f"{self.names.base}.{self.names.embedding[0]}.weight", "lm_head.weight"]]

    def build(
        self, parts: range, *, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> HuggingFaceStage:
        """Build some parts; everything else of the model never leaves the meta device."""
        check_dtype(dtype)
        skeleton = self._on_meta()
        embedding = skeleton.get_input_embeddings()
        stage = self._keep(skeleton, parts)
        if torch.device(device).type != "meta":
            materialise(stage)
            self._fill(stage, parts, skeleton, embedding, seed)
        move(stage, device, dtype)
        return stage

    def num_parameters(self) -> tuple[int, ...]:
        """How many parameters each part has."""
        skeleton = self._on_meta()
        of_parts = [self._modules_of(skeleton, part) for part in range(len(self.parts))]
        return tuple(sum(map(count_parameters, modules.values())) for modules in of_parts)

    def _on_meta(self) -> "PreTrainedModel":
        """The whole model without memory."""
        from transformers import AutoModelForCausalLM  # takes seconds, and is an extra

        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(self.config)
        return model

    def _modules_of(self, model: nn.Module, part: int) -> dict[str, nn.Module]:
        """The modules that a part consists of, by name."""
        names, (first, *_, last) = self.names, range(len(self.parts))
        if part == first:
            found = [f"{names.base}.{name}" for name in names.embedding]
        elif part == last:
            found = [f"{names.base}.{names.norm}", "lm_head"]
        else:
            found = [self.parts[part].name]
        return {name: model.get_submodule(name) for name in found}

    def _keep(self, model: nn.Module, parts: range) -> HuggingFaceStage:
        """Take out of a model all but some parts."""
        names, num_parts = self.names, len(self.parts)
        base = model.get_submodule(names.base)
        layers = base.get_submodule(names.layers)
        for layer in set(range(num_parts - 2)) - {part - 1 for part in parts}:
            layers.add_module(str(layer), HandOn())
        if 0 not in parts:
            for name in names.embedding:
                base.add_module(name, NoPositions() if name == "wpe" else nn.Identity())
        if num_parts - 1 not in parts:
            base.add_module(names.norm, nn.Identity())
        head = model.get_submodule("lm_head") if num_parts - 1 in parts else None
        return HuggingFaceStage(names.base, base, head)

    def _fill(
        self, stage: nn.Module, parts: range, skeleton: "PreTrainedModel", embedding: nn.Module, seed: int
    ) -> None:
        """Give parameters their initial values, and the constants of rotary embeddings theirs."""
        for part in parts:
            modules = self._modules_of(stage, part)
            if self.tied and self.parts[part].kind == "head":
                head = modules.pop("lm_head")
                if 0 not in parts:
                    self._draw(skeleton, 0, [embedding], seed)
                    head.load_state_dict(embedding.state_dict())
                else:
                    head.register_parameter("weight", embedding.get_parameter("weight"))
            self._draw(skeleton, part, modules.values(), seed)
        base = stage.get_submodule(self.names.base)
        rotary = base._modules.get("rotary_emb")
        if rotary is not None:
            base.add_module("rotary_emb", type(rotary)(config=self.config))

    def _draw(self, skeleton: "PreTrainedModel", part: int, modules: Iterable[nn.Module], seed: int) -> None:
        """Let the library fill the modules of a part, inner ones first."""
        with torch.no_grad(), drawing_from(derive_seed(seed, self.parts[part].name)):
            for module in modules:
                materialise(module)
                module.apply(skeleton._init_weights)


def causal_lm_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross entropy in nats of each token that follows on another, and how many there are.

    `labels` are the very tokens [batch, sequence] that were read, -100 where none is to be predicted; as in the
    library's models, logits predict the label one further on. Given to a `Pipeline`, each token of a batch weighs
    alike.
    """
    predicting, following = logits[:, :-1], labels[:, 1:]
    precise = predicting.to(torch.promote_types(predicting.dtype, torch.float32))
    total = functional.cross_entropy(
        precise.flatten(0, 1), following.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return total, (following != IGNORED_LABEL).sum()
