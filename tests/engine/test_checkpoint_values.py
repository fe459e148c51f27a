"""Values: what schedulers and optimizers remember, as JSON and tensors; nothing that runs."""

import json
import pickle
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stagewright.engine.checkpoint.optimizer import is_same
from stagewright.engine.checkpoint.values import decode, encode

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([torch.float32, torch.bool])
    | st.builds(torch.tensor, st.lists(st.floats(), max_size=3))
)
KEYS = st.integers() | st.text(max_size=3) | st.tuples(st.integers(), st.booleans())
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(KEYS, inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=3).map(Counter),
    max_leaves=10,
)


@given(VALUES)
def test_values_come_back_through_json_with_their_types(value: Any) -> None:
    tensors: dict[str, Tensor] = {}
    written = json.dumps(encode(value, "value", tensors), allow_nan=False)
    assert same_with_nan(decode(json.loads(written), tensors.__getitem__), value)


def same_with_nan(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_with_nan(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same_with_nan, one, other))
    return is_same(one, other)


def test_a_value_is_written_as_one_would_read_it() -> None:
    tensors: dict[str, Tensor] = {}
    value = OrderedDict(betas=(0.9, float("inf")), step=torch.tensor(3.0), counts=Counter({5: 1}))
    assert encode(value, "adam", tensors) == {
        "dict": [
            ["betas", {"tuple": [0.9, {"float": "inf"}]}],
            ["step", {"tensor": "adam/step"}],
            ["counts", {"counter": [[5, 1]]}],
        ]
    }
    assert tensors == {"adam/step": torch.tensor(3.0)}


def test_what_only_pickle_could_keep_is_refused() -> None:
    with pytest.raises(ValueError, match="loader/0/worker is a object, which only pickle could keep"):
        encode([{"worker": object()}], "loader", {})


class Bomb:
    """Goes off when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("executed",)


@pytest.mark.parametrize(
    "value",
    [
        {"tensor": 1},
        {"tuple": {"0": 1}},
        {"dict": [[1]]},
        {"dict": [[[1], 2]]},
        {"counter": [["a", "b"]]},
        {"float": "__import__('os')"},
        {"dtype": "load"},
        {"pickle": pickle.dumps(Bomb()).hex()},
        {"tuple": [], "dict": []},
        {},
    ],
)
def test_what_nothing_is_written_as_is_refused(value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no value is written as|cannot be a key|pairs of key and value|counts"):
        decode([value], {}.__getitem__)
    assert not capsys.readouterr().out
