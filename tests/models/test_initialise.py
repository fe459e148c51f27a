"""Initial parameters: the same for every cut, and GPT-2's."""

import hashlib
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from stagewright.models import TIED_WEIGHTS, GPTConfig, build_gpt, build_gpt_stage, derive_seed
from stagewright.models.initialise import initialise

CONFIG = GPTConfig(vocab_size=61, num_layers=7, hidden_size=24, num_heads=3, sequence_length=16)


def union_of_stages(config: GPTConfig, num_stages: int, seed: int = 0) -> dict[str, Tensor]:
    union: dict[str, Tensor] = {}
    for stage in range(num_stages):
        part = build_gpt_stage(config, stage, num_stages, seed=seed).state_dict()
        assert not union.keys() & part.keys(), "a parameter is on one stage only"
        union |= part
    return union


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5, 6, 7])
def test_every_cut_starts_from_the_same_parameters_bit_for_bit(num_stages: int) -> None:
    whole = build_gpt(CONFIG, seed=5).state_dict()
    union = union_of_stages(CONFIG, num_stages, seed=5)
    assert list(union) == list(whole)
    for name, parameter in whole.items():
        assert torch.equal(union[name], parameter), name


@pytest.mark.parametrize("num_stages", [1, 2, 7])
def test_tied_weights_start_equal_wherever_they_are_and_leave_all_others_as_they_were(num_stages: int) -> None:
    tied, untied = (union_of_stages(config, num_stages, seed=5) for config in (replace(CONFIG, tied=True), CONFIG))
    first, second = TIED_WEIGHTS
    assert torch.equal(tied[second], untied[first])
    assert not torch.equal(untied[second], untied[first])
    assert all(torch.equal(tied[name], untied[name]) for name in untied if name != second)


def test_on_one_stage_the_tied_weight_is_one_parameter() -> None:
    whole = build_gpt(replace(CONFIG, tied=True))
    assert whole.head is not None
    assert whole.embedding is not None
    assert whole.head.projection.weight is whole.embedding.tokens.weight
    assert TIED_WEIGHTS[0] in dict(whole.named_parameters())
    assert TIED_WEIGHTS[1] not in dict(whole.named_parameters())


def test_parameters_are_named_by_global_layer() -> None:
    names = set(build_gpt_stage(CONFIG, 2, 3).state_dict())
    layer = [
        "attention_norm.weight",
        "attention_norm.bias",
        "attention.query_key_value.weight",
        "attention.query_key_value.bias",
        "attention.output.weight",
        "attention.output.bias",
        "mlp_norm.weight",
        "mlp_norm.bias",
        "mlp.widen.weight",
        "mlp.widen.bias",
        "mlp.narrow.weight",
        "mlp.narrow.bias",
    ]
    head = {"head.norm.weight", "head.norm.bias", "head.projection.weight"}
    assert names == {f"layers.{index}.{name}" for index in (5, 6) for name in layer} | head


def test_stages_load_their_part_of_the_whole_models_state() -> None:
    whole = build_gpt(CONFIG, seed=9).state_dict()
    stage = build_gpt_stage(CONFIG, 1, 3, seed=0)
    stage.load_state_dict({name: whole[name] for name in stage.state_dict()})
    assert torch.equal(stage.state_dict()["layers.3.mlp.widen.weight"], whole["layers.3.mlp.widen.weight"])


def test_weights_are_spread_as_in_gpt2() -> None:
    config = GPTConfig(num_layers=3, hidden_size=128)
    for name, parameter in build_gpt(config).named_parameters():
        if name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            ends_a_branch = name.endswith(("attention.output.weight", "mlp.narrow.weight"))
            expected = 0.02 / math.sqrt(2 * config.num_layers) if ends_a_branch else 0.02
            # The sample deviation of n normal numbers is itself off by about 1 / sqrt(2n) of its size.
            assert parameter.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * parameter.numel())), name
            assert abs(parameter.mean().item()) < 5 * expected / math.sqrt(parameter.numel()), name


def test_no_two_weights_and_no_two_seeds_draw_the_same_numbers() -> None:
    config = GPTConfig(num_layers=3, hidden_size=16, num_heads=2)
    firsts = [
        round(parameter.flatten()[0].item() / parameter.std().item(), 6)
        for seed in (0, 1, -1)
        for name, parameter in build_gpt(config, seed=seed).named_parameters()
        if parameter.dim() == 2
    ]
    assert len(set(firsts)) == len(firsts) == 3 * (2 + 3 * 4 + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_start_from_the_same_numbers(dtype: torch.dtype) -> None:
    single = build_gpt(CONFIG, seed=5).state_dict()
    for name, parameter in build_gpt(CONFIG, seed=5, dtype=dtype).state_dict().items():
        assert parameter.dtype == dtype
        assert torch.equal(parameter, single[name].to(dtype)), name


def test_building_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    build_gpt(CONFIG, seed=3)
    build_gpt_stage(CONFIG, 1, 3, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_global_random_state_does_not_reach_the_parameters() -> None:
    torch.manual_seed(1)
    first = build_gpt(CONFIG).state_dict()
    torch.manual_seed(2)
    second = build_gpt(CONFIG).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_stage_on_the_meta_device_has_shapes_and_no_memory() -> None:
    parameters = list(build_gpt_stage(CONFIG, 0, 2, device="meta").parameters())
    assert parameters[0].shape == (61, 24)
    assert all(parameter.is_meta for parameter in parameters)


def test_the_derived_seed_is_as_documented() -> None:
    digest = hashlib.sha256(b"7:layers.3.mlp.widen.weight").hexdigest()
    assert derive_seed(7, "layers.3.mlp.widen.weight") == int(digest[:16], 16) // 2


def test_a_parameter_without_a_rule_is_never_left_unfilled() -> None:
    with pytest.raises(AssertionError, match=r"no rule initialises \['weight', 'bias'\] of 0, a Conv1d"):
        initialise(nn.Sequential(nn.Conv1d(2, 2, 1)), seed=0, num_layers=1)


def test_a_dtype_without_fractions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"floating-point dtype: got torch.int64; use torch.float32 or torch.bfloat16"):
        build_gpt(CONFIG, dtype=torch.int64)
