"""Batches are next-byte windows in an order that only seed and step decide."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stagewright.cli.batches import Batches

TEXT = bytes(range(97))


def test_targets_are_the_next_bytes() -> None:
    x, y = Batches(TEXT, sequence_length=8, batch_size=4, seed=0).batch(3)
    assert x.shape == y.shape == (4, 8)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1)  # in this text, byte n stands at position n
    assert torch.equal(x[:, 0] % 8, torch.zeros(4, dtype=torch.int64))


@given(st.integers(1, 7), st.integers(1, 30), st.integers(0, 5))
def test_an_epoch_visits_every_window_once(sequence_length: int, batch_size: int, seed: int) -> None:
    batches = Batches(TEXT, sequence_length, batch_size, seed)
    num_windows = 96 // sequence_length
    num_epochs = 3
    num_batches = -(-num_epochs * num_windows // batch_size)
    starts = torch.cat([batches.batch(step)[0][:, 0] for step in range(num_batches)]).tolist()
    every = list(range(0, num_windows * sequence_length, sequence_length))
    for epoch in range(num_epochs):
        assert sorted(starts[epoch * num_windows : (epoch + 1) * num_windows]) == every


def test_every_epoch_has_its_own_order() -> None:
    batches = Batches(TEXT, sequence_length=4, batch_size=24, seed=0)
    assert not torch.equal(batches.batch(0)[0], batches.batch(1)[0])


def test_the_order_is_resumable() -> None:
    forwards = Batches(TEXT, sequence_length=5, batch_size=3, seed=7)
    read = {step: forwards.batch(step)[0] for step in range(40)}
    for step in reversed(range(40)):
        assert torch.equal(Batches(TEXT, 5, 3, seed=7).batch(step)[0], read[step])
        assert torch.equal(forwards.batch(step)[0], read[step])


def test_the_seed_decides_the_order() -> None:
    one, other = (Batches(TEXT, sequence_length=4, batch_size=24, seed=seed).batch(0)[0] for seed in (1, 2))
    assert not torch.equal(one, other)


def test_bytes_above_127_stay_positive() -> None:
    x, y = Batches(bytes([200, 255, 128]), sequence_length=2, batch_size=1, seed=0).batch(0)
    assert x.tolist() == [[200, 255]]
    assert y.tolist() == [[255, 128]]


@pytest.mark.parametrize(
    ("data", "sequence_length", "batch_size", "message"),
    [
        (b"short", 5, 1, "5 bytes are too short for a sequence of 5"),
        (b"", 1, 1, "0 bytes are too short"),
        (b"text", 0, 1, "sequence length must be at least 1: got 0"),
        (b"text", 1, -2, "batch size must be at least 1: got -2"),
    ],
)
def test_what_cannot_be_cut_is_refused(data: bytes, sequence_length: int, batch_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batches(data, sequence_length, batch_size, seed=0)
