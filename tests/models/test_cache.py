"""Reading a text piece by piece with a cache gives the logits of reading it at once."""

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stagewright.models import GPTConfig, GPTStage, KeyValueCache, build_gpt_stage

CONFIG = GPTConfig(vocab_size=31, num_layers=5, hidden_size=24, num_heads=3, sequence_length=12)


def build_stages(num_stages: int) -> list[GPTStage]:
    stages = [build_gpt_stage(CONFIG, stage, num_stages, seed=4, dtype=torch.float64) for stage in range(num_stages)]
    for stage in stages:  # weights of the size of trained ones, for those that GPT-2 starts from hardly attend
        stage.eval()
        for parameter in stage.parameters():
            if parameter.dim() == 2:
                parameter.data.mul_(8)
    return stages


def random_tokens(rows: int, length: int) -> Tensor:
    return torch.randint(31, (rows, length), generator=torch.Generator().manual_seed(rows))


def read(stages: list[GPTStage], tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
    activation = tokens
    with torch.no_grad():
        for stage in stages:
            activation = stage(activation, cache=cache)
    return activation


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("num_prompt_tokens", [1, 2, 7, 12])
def test_after_the_prompt_every_token_has_the_logits_of_a_full_forward(num_prompt_tokens: int, num_stages: int) -> None:
    stages, tokens, cache = build_stages(num_stages), random_tokens(2, 12), KeyValueCache()
    assert_same(read(stages, tokens[:, :num_prompt_tokens], cache), read(stages, tokens[:, :num_prompt_tokens]))
    for position in range(num_prompt_tokens, 12):
        cached = read(stages, tokens[:, position : position + 1], cache)
        assert_same(cached[:, 0], read(stages, tokens[:, : position + 1])[:, -1])


@given(cuts=st.sets(st.integers(1, 11)))
def test_any_pieces_give_the_logits_of_the_whole(cuts: set[int]) -> None:
    stages, tokens, cache = build_stages(2), random_tokens(3, 12), KeyValueCache()
    pieces = [read(stages, tokens[:, start:end], cache) for start, end in pairwise([0, *sorted(cuts), 12])]
    assert_same(torch.cat(pieces, dim=1), read(stages, tokens))


def test_what_was_read_before_matters() -> None:
    stages, tokens = build_stages(1), random_tokens(2, 12)
    cache, other = KeyValueCache(), KeyValueCache()
    read(stages, tokens[:, :4], cache)
    read(stages, tokens[:, 4:8], other)
    difference = read(stages, tokens[:, 8:9], cache) - read(stages, tokens[:, 8:9], other)
    assert difference.abs().max() > 1e-3


def test_microbatches_in_flight_at_once_each_have_their_own() -> None:
    stages = build_stages(3)
    texts = [random_tokens(1, 9), random_tokens(2, 9)]
    caches = [KeyValueCache(), KeyValueCache()]
    for start, end in ((0, 4), (4, 5), (5, 9)):
        pieces = [text[:, start:end] for text in texts]
        for stage in stages:  # every stage sees one microbatch after the other, as in a pipeline
            with torch.no_grad():
                pieces = [stage(piece, cache=cache) for piece, cache in zip(pieces, caches)]
    for text, piece in zip(texts, pieces):
        assert_same(piece, read(stages, text)[:, 5:9])


def test_a_cache_counts_the_tokens_of_every_layer_under_its_global_index() -> None:
    stages, cache = build_stages(2), KeyValueCache()
    with torch.no_grad():
        activation = stages[0](random_tokens(2, 7), cache=cache)
    assert [cache.num_tokens(layer) for layer in range(5)] == [7, 7, 7, 0, 0]
    with torch.no_grad():
        stages[1](activation[:, :3], cache=cache)
    assert [cache.num_tokens(layer) for layer in range(5)] == [7, 7, 7, 3, 3]


def test_a_sequence_that_outgrows_the_positions_is_refused_and_leaves_the_cache_as_it_was() -> None:
    stages, tokens, cache = build_stages(1), random_tokens(1, 12), KeyValueCache()
    read(stages, tokens[:, :11], cache)
    with pytest.raises(ValueError, match="got 13 tokens for 12 positions; shorten the sequence or build with"):
        read(stages, tokens[:, :2], cache)
    assert_same(read(stages, tokens[:, 11:], cache), read(stages, tokens)[:, 11:])


def test_a_cache_in_training_mode_is_refused() -> None:
    (model,) = build_stages(1)
    with pytest.raises(ValueError, match=re.escape("call eval() first, or leave the cache out")):
        model.train()(random_tokens(1, 3), cache=KeyValueCache())


def test_a_cache_of_another_microbatch_is_refused() -> None:
    stages, cache = build_stages(1), KeyValueCache()
    read(stages, random_tokens(3, 4), cache)
    with pytest.raises(ValueError, match="got 2 sequences for a cache of 3; give every microbatch a cache of its own"):
        read(stages, random_tokens(2, 1), cache)
