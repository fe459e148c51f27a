"""Choosing the next token."""

import math
import re

import pytest
import torch

from stagewright.models import Sampler

LOGITS = torch.tensor([1.0, 3.0, -2.0, 2.5, 0.0])
NUM_DRAWS = 20_000


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    sampler = Sampler(temperature, seed=1)
    counts = torch.bincount(torch.tensor([sampler.draw(LOGITS) for _ in range(NUM_DRAWS)]), minlength=5)
    for count, probability in zip(counts.tolist(), torch.softmax(LOGITS / temperature, dim=0).tolist()):
        deviation = math.sqrt(NUM_DRAWS * probability * (1 - probability))
        assert abs(count - NUM_DRAWS * probability) < 5 * deviation


def test_temperature_0_takes_the_likeliest() -> None:
    sampler = Sampler(0.0, seed=1)
    assert [sampler.draw(LOGITS) for _ in range(20)] == [1] * 20


def test_the_seed_alone_decides() -> None:
    def text(seed: int) -> list[int]:
        sampler = Sampler(1.0, seed)
        torch.manual_seed(len(texts))  # what others draw must not matter
        return [sampler.draw(LOGITS) for _ in range(50)]

    texts: list[list[int]] = []
    for seed in (3, 3, 4):
        texts.append(text(seed))
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    Sampler(1.0, seed=3).draw(LOGITS)
    assert torch.equal(torch.get_rng_state(), before)


def test_rounding_does_not_change_the_text() -> None:
    logits = torch.randn(500, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = 1e-7 * torch.randn(500, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain, noisy = Sampler(1.0, seed=2), Sampler(1.0, seed=2)
    assert [plain.draw(row) for row in logits] == [noisy.draw(row) for row in logits + noise]


@pytest.mark.parametrize("temperature", [-0.5, math.inf, math.nan])
def test_a_temperature_that_cannot_be_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"a temperature is a number from 0 up: got {temperature}; pass 1")):
        Sampler(temperature, seed=0)
