"""Every kind of model trains in stages as it does in one piece: loss and gradients in float64, to 1e-12."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cutting import (
    SHAPES,
    assert_same,
    assert_stages_take_only_their_own_memory,
    in_one_piece,
    in_stages,
    whole_of,
)
from torch import Tensor, nn

from stagewright.models import (
    GPT,
    TIED_WEIGHTS,
    Cut,
    CuttableModel,
    GPTConfig,
    LlamaConfig,
    UNetConfig,
    build_gpt_stage,
    build_stage,
    cut_by_costs,
    cut_by_layout,
    cut_by_parameters,
    cut_evenly,
    cut_sequential,
    llama,
    token_loss,
    unet,
)

GPT_CONFIG = GPTConfig(vocab_size=13, num_layers=8, hidden_size=8, num_heads=2, sequence_length=6)
LLAMA_CONFIG = LlamaConfig(
    vocab_size=13, num_layers=8, hidden_size=16, num_heads=4, num_key_value_heads=2, intermediate_size=20
)
UNET_CONFIG = UNetConfig(image_channels=3, output_channels=2, channels=4, depth=4, groups=2)
ROWS = 6  # not a multiple of the microbatches


def eight_members() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 7),
        nn.Tanh(),
        nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.LayerNorm(9)),
        nn.Linear(9, 4, bias=False),
        nn.Unflatten(1, (2, 2)),
        nn.Conv1d(2, 3, 1),
        nn.Flatten(),
        nn.Linear(6, 1),
    )


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def tokens(rows: int = ROWS, seed: int = 0) -> Tensor:
    return torch.randint(13, (rows, 6), generator=torch.Generator().manual_seed(seed))


def model_and_batch(kind: str) -> tuple[CuttableModel, Tensor, Tensor, partial[Tensor]]:
    """A model with at least eight parts, a batch, and its loss."""
    match kind:
        case "gpt":
            return GPT(GPT_CONFIG), tokens(), tokens(seed=1), partial(token_loss)
        case "llama":
            return llama(LLAMA_CONFIG), tokens(), tokens(seed=1), partial(token_loss)
        case "sequential":
            return cut_sequential(eight_members), normal(ROWS, 5), normal(ROWS, 1), partial(nn.functional.mse_loss)
        case _:
            images, targets = normal(ROWS, 3, 16, 32), normal(ROWS, 2, 16, 32)
            return unet(UNET_CONFIG), images, targets, partial(nn.functional.mse_loss)


KINDS = ("gpt", "llama", "sequential", "unet")


@pytest.mark.parametrize(("name", "num_ranks"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_stages_is_the_model_in_one_piece(kind: str, name: str, num_ranks: int) -> None:
    model, x, y, loss_fn = model_and_batch(kind)
    expected = in_one_piece(whole_of(model), lambda whole: loss_fn(whole(x), y))
    assert all(gradient.abs().max() > 0 for gradient in expected.gradients.values())
    assert_same(in_stages(model, name, num_ranks, x, y, loss_fn=loss_fn), expected)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_tied_weights_are_one_weight(kind: str) -> None:
    model = GPT(replace(GPT_CONFIG, tied=True)) if kind == "gpt" else llama(replace(LLAMA_CONFIG, tied=True))
    expected = in_one_piece(whole_of(model), lambda whole: token_loss(whole(tokens()), tokens(seed=1)))
    for num_ranks in (1, 2):
        actual = in_stages(model, "zbv", num_ranks, tokens(), tokens(seed=1), loss_fn=token_loss, tied=[TIED_WEIGHTS])
        copy = actual.gradients.pop(TIED_WEIGHTS[1])
        assert torch.equal(copy, actual.gradients[TIED_WEIGHTS[0]])
        assert_same(actual, expected)


@pytest.mark.parametrize("layout", ["E|t|t*6|tL", "Et*7|t|L", "E|t*8|L", "Et*8L"])
def test_uneven_cuts_change_nothing_even_where_embedding_and_head_are_alone(layout: str) -> None:
    model, x, y, loss_fn = model_and_batch("gpt")
    expected = in_one_piece(whole_of(model), lambda whole: loss_fn(whole(x), y))
    cut = cut_by_layout(model.parts, layout)
    assert_same(in_stages(model, "1f1b", cut.num_stages, x, y, cut=lambda _: cut, loss_fn=loss_fn), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_by_cost_change_nothing(kind: str) -> None:
    model, x, y, loss_fn = model_and_batch(kind)
    expected = in_one_piece(whole_of(model), lambda whole: loss_fn(whole(x), y))
    assert_same(in_stages(model, "1f1b", 3, x, y, cut=partial(cut_by_parameters, model), loss_fn=loss_fn), expected)
    costs = [1.0 + index % 3 for index in range(len(model.parts))]
    assert_same(
        in_stages(model, "1f1b", 4, x, y, cut=partial(cut_by_costs, model.parts, costs), loss_fn=loss_fn), expected
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_starts_from_the_same_parameters_and_names_them_as_the_whole_does(kind: str) -> None:
    model = model_and_batch(kind)[0]
    whole = build_stage(model, cut_evenly(model.parts, 1), 0, seed=5).state_dict()
    for num_stages in (2, 3, 8):
        cut = cut_evenly(model.parts, num_stages)
        stages = [build_stage(model, cut, stage, seed=5).state_dict() for stage in range(num_stages)]
        assert [name for stage in stages for name in stage] == list(whole)
        for stage in stages:
            for name, parameter in stage.items():
                assert torch.equal(parameter, whole[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_gives_other_parameters_and_the_global_random_state_has_no_part_in_them(kind: str) -> None:
    model = model_and_batch(kind)[0]
    cut = cut_evenly(model.parts, 1)
    before = torch.get_rng_state()
    first = build_stage(model, cut, 0, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    again, other = (build_stage(model, cut, 0, seed=seed).state_dict() for seed in (5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert sum(not torch.equal(first[name], other[name]) for name in first) >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_never_takes_memory_for_another_ones_layers(kind: str) -> None:
    model = model_and_batch(kind)[0]
    for num_stages in (2, 8):
        assert_stages_take_only_their_own_memory(model, cut_evenly(model.parts, num_stages))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_counted_without_memory(kind: str) -> None:
    model = model_and_batch(kind)[0]
    counts = model.num_parameters()
    for part, count in enumerate(counts):
        assert count == sum(parameter.numel() for parameter in model.build(range(part, part + 1)).parameters())


def test_other_dtypes_start_from_the_same_numbers_and_keep_the_constants_of_rotations_precise() -> None:
    model = llama(LLAMA_CONFIG)
    whole = range(len(model.parts))
    single, half = model.build(whole, seed=1), model.build(whole, seed=1, dtype=torch.bfloat16)
    for (name, parameter), rounded in zip(single.named_parameters(), half.parameters(), strict=True):
        assert torch.equal(parameter.bfloat16(), rounded), name
    for (name, buffer), kept in zip(single.named_buffers(), half.buffers(), strict=True):
        assert name.endswith("rotary.frequencies")
        assert torch.equal(buffer, kept)
        assert kept.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_on_the_meta_device_has_no_memory(kind: str) -> None:
    model = model_and_batch(kind)[0]
    assert all(
        tensor.is_meta for tensor in build_stage(model, cut_evenly(model.parts, 2), 1, device="meta").parameters()
    )


def test_the_cut_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="got one of 3 parts for a model of 10; make it from this model's parts"):
        build_stage(GPT(GPT_CONFIG), Cut((1, 2)), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dtype_without_fractions_is_refused(kind: str) -> None:
    model = model_and_batch(kind)[0]
    with pytest.raises(ValueError, match=r"floating-point dtype: got torch.int64; use torch.float32"):
        build_stage(model, cut_evenly(model.parts, 1), 0, dtype=torch.int64)


def test_a_stage_of_the_gpt_takes_any_cut_into_as_many_stages() -> None:
    cut = cut_by_layout(GPT(GPT_CONFIG).parts, "E|t*8|L")
    stages = [build_gpt_stage(GPT_CONFIG, stage, 3, cut=cut, seed=5) for stage in range(3)]
    assert [len(stage.layers) for stage in stages] == [0, 8, 0]
    assert stages[0].embedding is not None
    assert stages[2].head is not None
    with pytest.raises(ValueError, match="got a cut into 3 for 4 stages; make it for 4"):
        build_gpt_stage(GPT_CONFIG, 0, 4, cut=cut)
