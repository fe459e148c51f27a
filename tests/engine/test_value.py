"""Values are taken apart and put together again, in memory and in writing."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stagewright.engine.value import Layout, pack, unpack
from stagewright.engine.writing import read_layout, write_layout

TENSORS = st.builds(
    lambda dtype, shape, graded: torch.zeros(shape, dtype=dtype, requires_grad=graded and dtype.is_floating_point),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint16]),
    st.lists(st.integers(0, 3), max_size=3),
    st.booleans(),
)
KEYS = st.one_of(st.text(max_size=3), st.integers(-(2**70), 2**70))
VALUES = st.recursive(
    st.one_of(TENSORS, st.none()),
    lambda members: st.one_of(
        st.lists(members, max_size=3),
        st.lists(members, max_size=3).map(tuple),
        st.dictionaries(KEYS, members, max_size=3),
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    """The same containers with the very same tensors, keys in the same order."""
    if isinstance(one, Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one is None


@given(VALUES)
def test_unpack_reverses_pack(value: Any) -> None:
    packed = pack(value, "the test")
    assert same(unpack(packed.layout.skeleton, packed.tensors), value)
    for index, tensor in enumerate(packed.tensors):
        assert packed.layout.dtypes[index] == tensor.dtype
        assert packed.layout.shapes[index] == tensor.shape
        assert packed.layout.differentiable[index] == tensor.requires_grad


@given(VALUES)
def test_a_layout_survives_being_written(value: Any) -> None:
    layout = pack(value, "the test").layout
    assert read_layout(write_layout(layout)) == layout
    assert hash(layout) == hash(read_layout(write_layout(layout)))


FOREIGN = [
    b"",
    b"{}",
    b"[1,2,3,4]",
    b"\xff\xfe",
    b'["t",["float32"],[[1]]]',
    b'["x",[],[],[]]',
    b'["t",["float99"],[[1]],[true]]',
    b'["t",["float32"],[[-1]],[true]]',
    b'["t",["float32"],[[1.5]],[true]]',
    b'["t",["float32"],[[true]],[true]]',
    b'["t",["float32","float32"],[[1]],[true]]',
    b'[["tuple","t","t"],["float32"],[[1]],[true]]',
    b'[["dict",["a"],"t","t"],["float32"],[[1]],[true]]',
    b'[["dict",[null],"t"],["float32"],[[1]],[true]]',
    b'[["set","t"],["float32"],[[1]],[true]]',
    b"[" * 100_000,
    b"[" + b'["list",' * 70 + b'"t"' + b"]" * 70 + b',["float32"],[[1]],[true]]',
]


@pytest.mark.parametrize("text", FOREIGN, ids=lambda text: str(text[:30]))
def test_what_is_no_layout_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match="message"):
        read_layout(text)


@given(st.binary(max_size=40))
def test_only_value_errors_come_out(text: bytes) -> None:
    try:
        layout = read_layout(text)
    except ValueError:
        return
    assert isinstance(layout, Layout)
