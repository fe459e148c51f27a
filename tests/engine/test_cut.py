"""A batch is cut into microbatches by rows, and outputs are put together again in order."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stagewright.engine.batch import join, split


@given(st.integers(1, 40), st.integers(1, 9))
def test_rows_are_dealt_evenly_the_first_ones_one_more(rows: int, num_microbatches: int) -> None:
    x = torch.arange(rows)
    if rows < num_microbatches:
        with pytest.raises(ValueError, match=f"x has {rows} rows for {num_microbatches} microbatches"):
            split(x, num_microbatches, "x")
        return
    parts = split(x, num_microbatches, "x")
    assert torch.equal(torch.cat(parts), x)
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_every_tensor_of_a_value_is_cut() -> None:
    value = {"a": torch.arange(5), "b": [None, (torch.arange(10).reshape(5, 2),)]}
    first, second = split(value, 2, "x")
    assert first["a"].tolist() == [0, 1, 2]
    assert second["b"][0] is None
    assert second["b"][1][0].tolist() == [[6, 7], [8, 9]]


def test_a_microbatch_is_no_copy() -> None:
    x = torch.arange(6)
    assert [part.data_ptr() for part in split(x, 3, "x")] == [x[0:].data_ptr(), x[2:].data_ptr(), x[4:].data_ptr()]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (
            (torch.ones(4), torch.ones(5)),
            ValueError,
            "the tensors of x must agree about the number of rows",
        ),
        (torch.ones(()), ValueError, "x is cut along its first dimension, but holds a tensor without dimensions"),
        ({"a": None}, ValueError, "x holds no tensor, so it has no rows to cut into microbatches"),
        ([torch.ones(4), 3], TypeError, "x is made of tensors, tuples, lists, dicts and None: it holds a int"),
    ],
)
def test_what_cannot_be_cut(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        split(value, 2, "x")


def test_join_reverses_split() -> None:
    value = {"a": torch.arange(5), "b": [None, (torch.arange(10).reshape(5, 2),)]}
    joined = join(split(value, 3, "x"))
    assert joined["a"].tolist() == value["a"].tolist()  # type: ignore[union-attr]
    assert joined["b"][0] is None
    assert torch.equal(joined["b"][1][0], value["b"][1][0])  # type: ignore[index]


def test_tensors_without_dimensions_become_one_entry_a_microbatch() -> None:
    outputs = [{"mean": torch.tensor(float(index)), "rows": torch.full((2,), index)} for index in range(3)]
    joined = join(outputs)
    assert joined["mean"].tolist() == [0, 1, 2]
    assert joined["rows"].tolist() == [0, 0, 1, 1, 2, 2]


def test_outputs_of_several_structures_cannot_be_put_together() -> None:
    outputs: list[Any] = [Tensor([1]), (Tensor([1]), Tensor([1]))]
    with pytest.raises(ValueError, match="must be of one structure: microbatch 0 gave t and microbatch 1"):
        join(outputs)
