"""The Llama-style decoder; that it computes what the library's does, `test_hugging_face.py` holds."""

import re
from typing import Any

import pytest
import torch

from stagewright.models import LlamaConfig, llama
from stagewright.models.rotary import Rotary

CONFIG = LlamaConfig(vocab_size=13, num_layers=2, hidden_size=16, num_heads=4, num_key_value_heads=2)


def test_a_rotation_depends_on_how_far_apart_two_positions_are() -> None:
    rotary = Rotary(8, 10_000.0)
    rotary.reset_parameters()
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    queries, keys = (rotary(vector.expand(1, 1, 10, 8))[0, 0] for vector in (query, key))
    scores = queries @ keys.T
    for distance in range(10):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    assert scores[0, 0].item() == pytest.approx((query @ key).item())
    assert len({round(scores[distance, 0].item(), 4) for distance in range(10)}) == 10


def test_each_pair_turns_at_its_own_frequency() -> None:
    rotary = Rotary(4, 100.0)
    rotary.reset_parameters()
    assert rotary.frequencies.tolist() == pytest.approx([1.0, 0.1])
    heads = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64).expand(1, 1, 3, 4)
    cosine_1, cosine_2 = torch.tensor(2.0).cos().item(), torch.tensor(0.2).cos().item()
    sine_1, sine_2 = torch.tensor(2.0).sin().item(), torch.tensor(0.2).sin().item()
    assert rotary(heads)[0, 0, 2].tolist() == pytest.approx([cosine_1, cosine_2, sine_1, sine_2], abs=1e-6)


def test_a_later_token_never_changes_earlier_logits() -> None:
    model = llama(CONFIG).build(range(4), dtype=torch.float64)
    tokens = torch.arange(6).remainder(13)[None]
    changed = tokens.clone()
    changed[0, 3] += 1
    differs = (model(changed) - model(tokens)).abs().amax(dim=-1)[0] > 1e-12
    assert differs.tolist() == [False] * 3 + [True] * 3


def test_parameters_are_named_by_global_layer() -> None:
    names = set(llama(CONFIG).build(range(2, 4)).state_dict())
    layer = [
        *("attention_norm.weight", "mlp_norm.weight"),
        *(f"attention.{name}.weight" for name in ("query", "key", "value", "output")),
        *(f"mlp.{name}.weight" for name in ("gate", "widen", "narrow")),
    ]
    assert names == {f"layers.1.{name}" for name in layer} | {"head.norm.weight", "head.projection.weight"}


def test_fewer_heads_for_keys_and_values_have_fewer_parameters() -> None:
    _, layer, *_ = llama(CONFIG).num_parameters()
    assert layer == 2 * 16 + 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 352


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1: got 0"),
        ({"hidden_size": 10, "num_heads": 4}, "num_heads must divide hidden_size: got 4 heads for a hidden size of 10"),
        ({"num_heads": 4, "num_key_value_heads": 3}, "got 3 for 4 heads; use 4, or 1"),
        ({"hidden_size": 12, "num_heads": 4}, "a head's width is even: got 12 / 4 = 3; use a hidden size of 16"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        LlamaConfig(**sizes)
