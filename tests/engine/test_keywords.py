"""Keyword arguments of a step reach every stage, microbatch by microbatch."""

import re
from typing import Any

import pytest
import torch
from modules import Stages
from plain import make_batch, squared_error
from scenario import Scenario, assert_alike
from torch import Tensor, nn

from stagewright.engine import Pipeline
from stagewright.engine.batch import split_keywords


class Masked(nn.Module):
    """Uses a mask by rows, positions that are not by rows, a pair of tensors, a number and a word."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(
        self, x: Tensor, mask: Tensor, positions: Tensor, pair: tuple[Tensor, Tensor], power: int, kind: str
    ) -> Tensor:
        assert len(mask) == len(x) == len(pair[0]) == len(pair[1])
        assert positions.shape == (6,)
        assert kind == "tanh"
        y: Tensor = self.linear(x * mask + positions).tanh() ** power
        return y + pair[0] * pair[1]


def arguments(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(70 + step)
    rows = [torch.randn(9, 6, generator=generator, dtype=torch.float64) for _ in range(3)]
    return {
        "mask": rows[0] > 0,
        "positions": torch.arange(6),
        "pair": (rows[1], rows[2]),
        "power": 2 + step,
        "kind": "tanh",
    }


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "dualpipe"])
def test_equals_plain_loop(name: str) -> None:
    scenario = Scenario(Stages(Masked), keywords=arguments, split_spec={"positions": None})
    assert_alike(scenario, name, num_ranks=2, num_microbatches=4)


class Transposed(nn.Module):
    """Takes an argument that has its rows in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, columns: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + columns.t()
        return y


def columns(step: int) -> dict[str, Any]:
    return {"columns": torch.arange(54, dtype=torch.float64).reshape(6, 9) / 10}


@pytest.mark.parametrize("dimension", [1, -1])
def test_cut_along_another_dimension(dimension: int) -> None:
    scenario = Scenario(Stages(Transposed), keywords=columns, split_spec={"columns": dimension})
    assert_alike(scenario, "1f1b", num_ranks=2, num_microbatches=4)


def test_evaluation_takes_them_too() -> None:
    with Pipeline(Stages(Transposed), num_microbatches=2, loss_fn=squared_error, split_spec={"columns": 1}) as pipe:
        x, y = make_batch(9, 0)
        expected = pipe.modules[0](x, **columns(0))
        for num_microbatches in (1, 2, 9):
            outputs = pipe.predict(x, num_microbatches=num_microbatches, **columns(0))
            torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
            loss = pipe.eval_step(x, y, num_microbatches=num_microbatches, **columns(0))
            torch.testing.assert_close(loss, squared_error(expected, y).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("value", "split_spec", "message"),
    [
        (
            torch.ones(1, 6),
            {},
            "mask is cut into 4 microbatches along dimension 0: its shape is (1, 6); say "
            "split_spec={'mask': None} to give it to each microbatch whole",
        ),
        (torch.ones(()), {}, "mask is cut into 4 microbatches along dimension 0: its shape is ()"),
        (
            {"a": [torch.ones(8), torch.ones(3)]},
            {},
            "along dimension 0: its shape is (3,)",
        ),
        (torch.ones(8), {"mask": 1}, "mask is cut into 4 microbatches along dimension 1: its shape is (8,)"),
        (torch.ones(8), {"musk": 0}, "split_spec names ['musk'], but the arguments are ['mask']"),
    ],
)
def test_what_cannot_be_cut(value: Any, split_spec: dict[str, int | None], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        split_keywords({"mask": value}, 4, split_spec)


def test_whatever_is_no_tensor_is_given_to_each_as_it_is() -> None:
    thing = object()
    parts = split_keywords({"thing": thing, "pair": (1, "two"), "none": None}, 2, {})
    assert parts == [{"thing": thing, "pair": (1, "two"), "none": None}] * 2
