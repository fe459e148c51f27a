"""Hugging Face models in stages are the library's own model in one piece."""

import re
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from cutting import SEED, Result, assert_same, assert_stages_take_only_their_own_memory, in_one_piece, in_stages
from torch import Tensor
from torch.nn import functional

from stagewright.models import (
    HuggingFaceModel,
    LlamaConfig,
    build_stage,
    causal_lm_loss,
    cut_by_layout,
    cut_by_parameters,
    cut_evenly,
    llama,
)

transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install 'stagewright[hf]'")

VOCAB, LENGTH, ROWS = 17, 7, 6
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}


def config_of(family: str, **changes: Any) -> Any:
    """A tiny model of a family."""
    if family == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 8, "n_head": 2, "n_positions": 16, "vocab_size": VOCAB}
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        tokens = {"bos_token_id": 1, "eos_token_id": 2}
        return transformers.GPT2Config(**{**sizes, **no_dropout, **tokens, **changes})
    if family == "qwen3":
        changes = {"head_dim": 8, **changes}
    kind = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}[family]
    return getattr(transformers, kind)(**{**SIZES, **changes})


def precise_norm(norm: Any, x: Tensor) -> Tensor:
    """RMSNorm in the precision of what comes in."""
    return norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)


@pytest.fixture(autouse=True)
def norms_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library computes these norms in float32 whatever the model is in, so the order of sums would show in 1e-8."""
    for family, kind in (("llama", "Llama"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3")):
        name = f"transformers.models.{family}.modeling_{family}.{kind}RMSNorm.forward"
        monkeypatch.setattr(name, precise_norm)


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def unsplit(model: HuggingFaceModel) -> Any:
    """The library's own model in float64, with the weights that the stages start from."""
    whole = transformers.AutoModelForCausalLM.from_config(model.config).double()
    state = model.build(range(len(model.parts)), seed=SEED, dtype=torch.float64).state_dict()
    assert list(whole.load_state_dict(state, strict=False)) == [[], []]
    return whole


def library_result(model: HuggingFaceModel, x: Tensor, labels: Tensor, **extras: Tensor) -> Result:
    """What the library's model computes; its own loss is the same, but in float32."""
    return in_one_piece(unsplit(model), partial(library_loss, x, labels, extras))


def library_loss(x: Tensor, labels: Tensor, extras: dict[str, Tensor], whole: Any) -> Tensor:
    """The mean over all tokens that are to be predicted."""
    output = whole(input_ids=x, labels=labels, use_cache=False, **extras)
    loss = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert loss.item() == pytest.approx(output.loss.item(), rel=1e-6)
    return loss


def without_copies(result: Result, model: HuggingFaceModel) -> Result:
    """Where a weight is tied over stages, its copies have one gradient, which the whole model has once."""
    for first, copy in model.tied:
        gradient = result.gradients.pop(copy, None)
        assert gradient is None or torch.equal(gradient, result.gradients[first])
    return result


FAMILIES = ["gpt2", "llama", "qwen2", "qwen3"]


@pytest.mark.parametrize(("name", "num_ranks"), [("1f1b", 1), ("1f1b", 2), ("1f1b", 4), ("zbv", 2), ("zbv", 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_stages_is_the_librarys_own(family: str, name: str, num_ranks: int) -> None:
    model = HuggingFaceModel(config_of(family))
    expected = library_result(model, tokens(), tokens())
    actual = in_stages(model, name, num_ranks, tokens(), tokens(), loss_fn=causal_lm_loss, tied=model.tied)
    assert_same(without_copies(actual, model), expected)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_tied_head_is_the_embedding(family: str) -> None:
    model = HuggingFaceModel(config_of(family, tie_word_embeddings=True))
    assert model.tied == [["model.embed_tokens.weight", "lm_head.weight"]]
    expected = library_result(model, tokens(), tokens())
    actual = in_stages(model, "zbv", 2, tokens(), tokens(), loss_fn=causal_lm_loss, tied=model.tied)
    assert_same(without_copies(actual, model), expected)


def padded() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens whose rows begin with 0, 1, 2, … of padding; what attention may see; labels without the padding."""
    lengths = torch.arange(ROWS).remainder(5)
    mask = (torch.arange(LENGTH) >= lengths[:, None]).long()
    x = torch.where(mask == 1, tokens(), 3)
    return x, mask, torch.where(mask == 1, x, -100)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_masks_and_position_ids_cross_with_the_activation(family: str) -> None:
    model = HuggingFaceModel(config_of(family))
    x, mask, labels = padded()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = library_result(model, x, labels, attention_mask=mask, position_ids=positions)
    assert expected.loss != pytest.approx(library_result(model, x, labels).loss, abs=1e-9), "they matter"
    inputs = {"input_ids": x, "attention_mask": mask, "position_ids": positions}
    actual = in_stages(model, "interleaved", 2, inputs, labels, loss_fn=causal_lm_loss, tied=model.tied)
    assert_same(without_copies(actual, model), expected)


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_mask_may_be_a_keyword_that_every_stage_is_given(family: str) -> None:
    model = HuggingFaceModel(config_of(family))
    x, mask, labels = padded()
    expected = library_result(model, x, labels, attention_mask=mask)
    options = {"loss_fn": causal_lm_loss, "tied": model.tied, "keywords": {"attention_mask": mask}}
    assert_same(without_copies(in_stages(model, "1f1b", 4, x, labels, **options), model), expected)


def test_what_no_stage_knows_is_refused() -> None:
    model = HuggingFaceModel(config_of("llama"))
    stage = build_stage(model, cut_evenly(model.parts, 2), 0)
    for batch in ({"input_ids": tokens(), "labels": tokens()}, {"attention_mask": tokens()}):
        message = f"got {', '.join(sorted(batch))}; give labels as the target, and leave out the others"
        with pytest.raises(ValueError, match=re.escape(message)):
            stage(batch)


def test_layers_that_see_a_window_keep_their_kind() -> None:
    """Which layers slide is decided by the global layer, on whatever stage it is."""
    kinds = ["full_attention", "sliding_attention"] * 4
    config = config_of("qwen3", layer_types=kinds, use_sliding_window=True, sliding_window=2)
    model = HuggingFaceModel(config)
    expected = library_result(model, tokens(), tokens())
    assert expected.loss != pytest.approx(library_result(HuggingFaceModel(config_of("qwen3")), tokens(), tokens()).loss)
    assert_same(in_stages(model, "1f1b", 4, tokens(), tokens(), loss_fn=causal_lm_loss), expected)


@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
def test_a_state_dict_goes_from_stages_to_the_whole_model_and_back(family: str) -> None:
    model = HuggingFaceModel(config_of(family))
    cut = cut_evenly(model.parts, 3)
    stages = [build_stage(model, cut, stage, seed=1) for stage in range(3)]
    united = {name: tensor for stage in stages for name, tensor in stage.state_dict().items()}
    whole = transformers.AutoModelForCausalLM.from_config(model.config)
    assert united.keys() == whole.state_dict().keys()
    drawn = whole.state_dict()
    for stage in stages:
        stage.load_state_dict({name: drawn[name] for name in stage.state_dict()})
    activation = tokens()
    for stage in stages:
        activation = stage(activation)
    torch.testing.assert_close(activation, whole(tokens()).logits, rtol=1e-5, atol=1e-6)
    whole.load_state_dict(united)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, united[name]), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_cut_starts_from_the_same_parameters(family: str, tied: bool) -> None:
    model = HuggingFaceModel(config_of(family, tie_word_embeddings=tied))
    whole = build_stage(model, cut_evenly(model.parts, 1), 0, seed=5).state_dict()
    for cut in (cut_evenly(model.parts, 3), cut_by_parameters(model, 4), cut_by_layout(model.parts, "E|t|t*7|L")):
        for stage in range(cut.num_stages):
            for name, parameter in build_stage(model, cut, stage, seed=5).state_dict().items():
                assert torch.equal(parameter, whole[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_spread_as_the_library_spreads_them(family: str) -> None:
    model = HuggingFaceModel(config_of(family, hidden_size=64) if family != "gpt2" else config_of(family, n_embd=64))
    ours = build_stage(model, cut_evenly(model.parts, 1), 0).state_dict()
    for name, theirs in transformers.AutoModelForCausalLM.from_config(model.config).state_dict().items():
        if theirs.std() == 0:
            assert torch.equal(ours[name], theirs), name
        else:
            assert ours[name].std().item() == pytest.approx(theirs.std().item(), rel=10 / theirs.numel() ** 0.5), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_never_takes_memory_for_another_ones_layers(family: str) -> None:
    model = HuggingFaceModel(config_of(family))
    assert_stages_take_only_their_own_memory(model, cut_evenly(model.parts, 4))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_stage_has_the_frequencies_of_rotary_embeddings_also_in_low_precision(family: str) -> None:
    model = HuggingFaceModel(config_of(family))
    expected = dict(transformers.AutoModelForCausalLM.from_config(model.config).named_buffers())
    assert "model.rotary_emb.inv_freq" in expected
    for stage in range(4):
        module = build_stage(model, cut_evenly(model.parts, 4), stage, dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
        buffers = dict(module.named_buffers())
        assert buffers.keys() == expected.keys()
        for name, buffer in buffers.items():
            torch.testing.assert_close(buffer, expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_as_the_library_counts_them(family: str) -> None:
    model = HuggingFaceModel(config_of(family))
    whole = transformers.AutoModelForCausalLM.from_config(model.config).num_parameters()
    shared = VOCAB * 16 if model.tied else 0
    assert sum(model.num_parameters()) == whole + shared


def test_our_llama_is_the_librarys_llama() -> None:
    ours = llama(LlamaConfig(vocab_size=VOCAB, num_layers=8, hidden_size=16, num_heads=4, intermediate_size=20))
    whole = ours.build(range(10), seed=SEED, dtype=torch.float64)
    theirs = transformers.AutoModelForCausalLM.from_config(config_of("llama", rms_norm_eps=1e-5)).double()
    ours_by_theirs = {
        "model.embed_tokens": "embedding.tokens",
        "model.norm": "head.norm",
        "lm_head": "head.projection",
        "model.layers": "layers",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "mlp_norm",
        "self_attn.q_proj": "attention.query",
        "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value",
        "self_attn.o_proj": "attention.output",
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.widen",
        "mlp.down_proj": "mlp.narrow",
    }
    state = whole.state_dict()
    for name in theirs.state_dict():
        renamed = name
        for their_name, our_name in ours_by_theirs.items():
            renamed = re.sub(rf"(^|\.){re.escape(their_name)}\.", rf"\1{our_name}.", renamed)
        theirs.get_parameter(name).data.copy_(state.pop(renamed))
    assert not state
    torch.testing.assert_close(whole(tokens()), theirs(tokens()).logits, rtol=1e-12, atol=1e-12)


def test_the_loss_is_the_librarys_where_labels_are_ignored() -> None:
    logits = torch.randn(3, 5, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([[-100, 4, 2, -100, 1], [3, 3, 3, 3, 3], [-100] * 5])
    total, count = causal_lm_loss(logits, labels)
    library = transformers.AutoModelForCausalLM.from_config(config_of("llama")).loss_function
    assert count == 7
    assert (total / count).item() == pytest.approx(library(logits, labels, vocab_size=VOCAB).item(), rel=1e-6)


def test_a_model_whose_parts_are_not_known_is_refused() -> None:
    config = transformers.OPTConfig()
    with pytest.raises(ValueError, match=r"parts are known can be cut, gpt2, llama, .*: got 'opt'; add its names to"):
        HuggingFaceModel(config)


def test_too_many_stages_are_refused() -> None:
    model = HuggingFaceModel(config_of("gpt2"))
    with pytest.raises(ValueError, match="got 8 layers for 9 stages; use 9 or more layers, or fewer stages"):
        partial(cut_by_parameters, model)(9)


def test_the_library_is_imported_only_where_it_is_used() -> None:
    code = "import sys, stagewright.models; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
