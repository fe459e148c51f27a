"""The bench of split backward: what it measures and prints, at a small shape; no time is asserted."""

import pytest
import torch

from stagewright.bench import split_backward
from stagewright.bench.split_backward import Blocks, Rounds, measure
from stagewright.models import GPTConfig

CONFIG = GPTConfig(num_layers=2, hidden_size=8, num_heads=2, sequence_length=4)


def test_ratios_are_those_of_each_round() -> None:
    rounds = Rounds(full=[(1.0, 2.0, 0.0), (1.0, 4.0, 0.0)])
    split = [(1.0, 1.0, 1.0), (1.0, 3.0, 2.0)]
    assert rounds.together(split) == [1.0, 1.25]
    assert rounds.weight(split) == [0.5, 0.5]


def test_every_part_of_every_round_takes_time() -> None:
    rounds = measure(CONFIG, 2, 3)
    for seconds in (*rounds.split, *rounds.torch_split):
        assert all(part > 0 for part in seconds)
    for forward, backward, _ in rounds.full:
        assert forward > 0
        assert backward > 0
    assert len(rounds.full) == len(rounds.split) == len(rounds.torch_split) == 3


@pytest.mark.parametrize("way", ["_full", "_split", "_torch_split"])
def test_all_ways_make_the_same_gradients(way: str) -> None:
    """What is compared is the same work."""
    module = Blocks(CONFIG).double()
    x, dy = torch.randn(2, 2, 4, 8, dtype=torch.float64)
    (module(x) * dy).sum().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    stage = split_backward.Stage(
        1, module, split_backward.Seeds(0, torch.device("cpu")), splits_backward=way == "_split"
    )
    getattr(split_backward, way)(module if way == "_torch_split" else stage, x, dy)
    torch.testing.assert_close([parameter.grad for parameter in module.parameters()], expected)


def test_the_table_shows_bars_and_torch(capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"layers": 1, "hidden": 8, "heads": 2, "sequence": 4, "batch": 2, "rounds": 3}
    assert split_backward.main([f"--{name}={size}" for name, size in shape.items()]) == 0
    printed = capsys.readouterr().out
    assert "(I+W)/B" in printed
    assert "W/B" in printed
    assert "\n split by torch" in printed
    assert "bar: (I+W)/B at most 1.05, W/B at least 0.35" in printed
