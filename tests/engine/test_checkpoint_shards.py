"""Shards: safetensors files, whose every size is checked before it is believed."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stagewright.engine import read_state_dict, write_state_dict
from stagewright.engine.checkpoint.files import Written
from stagewright.engine.checkpoint.shards import DTYPES, Shard

TENSORS = {
    "matrix": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "turned": torch.arange(6, dtype=torch.float64).reshape(2, 3).T,
    "low": torch.tensor([1.5, float("nan"), float("-inf")], dtype=torch.bfloat16),
    "number": torch.tensor(7),
    "nothing": torch.empty(3, 0, 2),
    "mask": torch.tensor([True, False, True]),
    "conjugate": torch.tensor([1 + 2j, 3j], dtype=torch.complex64).conj(),
}


def is_same(one: Tensor, other: Tensor) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(one.contiguous().flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def test_tensors_come_back_bit_by_bit(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    every = {name: torch.arange(5).to(dtype) for name, dtype in DTYPES.items()}
    write_state_dict(path, TENSORS | every)
    found = read_state_dict(path)
    assert list(found) == [*TENSORS, *every]
    assert all(is_same(tensor.resolve_conj(), found[name]) for name, tensor in (TENSORS | every).items())
    assert [file.name for file in tmp_path.iterdir()] == ["all.safetensors"]


def test_the_format_is_that_of_safetensors(tmp_path: Path) -> None:
    """What we write the library reads, and the other way round."""
    library = pytest.importorskip("safetensors.torch", reason="the safetensors library is not installed")
    write_state_dict(tmp_path / "ours.safetensors", TENSORS)
    theirs = library.load_file(tmp_path / "ours.safetensors")
    assert theirs.keys() == TENSORS.keys()
    assert all(is_same(tensor.resolve_conj(), theirs[name]) for name, tensor in TENSORS.items())
    library.save_file(theirs, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    again = read_state_dict(tmp_path / "theirs.safetensors")
    assert again.keys() == theirs.keys()
    assert all(is_same(tensor, again[name]) for name, tensor in theirs.items())


def of_header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: Any, start: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it has 0 bytes, too few for a header"),
        (b"\x80\x04\x95pickled!", "too few for a header of .*: this is no safetensors file"),
        ((2**63).to_bytes(8, "little") + b"{}", "too few for a header of 9223372036854775808"),
        (of_header(b"{"), "Expecting"),
        (of_header(b"[" * 100_000), "recursion"),
        (of_header([1]), "its header is no JSON object"),
        (of_header({"a": 1}), "a has no type, shape and place: got 1"),
        (of_header({"a": entry([2], 0, 8, "F99")}, bytes(8)), "a has no type, shape and place"),
        (of_header({"a": entry([True], 0, 4)}, bytes(4)), "a has no type, shape and place"),
        (of_header({"a": entry([-1], 0, 4)}, bytes(4)), "a has no type, shape and place"),
        (of_header({"a": entry([2], 0, 4)}, bytes(4)), r"a of shape \[2\] takes 8 bytes: got those from 0 to 4"),
        (of_header({"a": entry([2**40], 0, 2**42)}, bytes(4)), "its tensors take 4398046511104 bytes, but there are 4"),
        (of_header({"a": entry([0, 2**62], 0, 0)}), "a has the impossible shape"),
        (of_header({"a": entry([1] * 65, 0, 4)}, bytes(4)), "a has the impossible shape"),
        (of_header({"a": entry([1], 4, 8)}, bytes(8)), "tensors lie one after the other: a starts at 4 and not at 0"),
        (of_header({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, bytes(8)), "b starts at 4 and not at 8"),
        (of_header({"a": entry([1], 0, 4)}, bytes(8)), "its tensors take 4 bytes, but there are 8"),
    ],
)
def test_what_is_no_shard_is_refused_by_name(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "foreign.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"foreign\.safetensors cannot be read: .*{message}"):
        Shard(path)


def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gone cannot be read: it is not there"):
        Shard(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"there is no checkpoint in .*"):
        read_state_dict(tmp_path)
    write_state_dict(tmp_path / "a", TENSORS)
    with pytest.raises(ValueError, match="a cannot be read: there is no other"):
        Shard(tmp_path / "a").read("other")


def test_every_changed_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    write_state_dict(path, {"a": torch.arange(4)})
    whole = path.read_bytes()
    written = Written(len(whole), hashlib.sha256(whole).hexdigest())
    assert torch.equal(Shard(path, written).read("a"), torch.arange(4))
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(ValueError, match="shard cannot be read: its contents have changed"):
            Shard(path, written)
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"{len(whole)} bytes were written, but it has {len(whole) - 1}"):
        Shard(path, written)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.eye(2).to_sparse(), "plain dense tensors: a is a Tensor"),
        (torch.zeros(1, dtype=torch.complex128), "no tensors of type torch.complex128: a is one"),
    ],
)
def test_what_the_format_does_not_have_is_not_written(tensor: Tensor, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        write_state_dict(tmp_path / "a", {"a": tensor})
    assert not (tmp_path / "a").exists()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from(["F32", "dtype", "shape"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a"]), inner, max_size=3),
    max_leaves=8,
)
ENTRIES = st.builds(
    entry,
    st.lists(st.integers(0, 2**65) | JSON, max_size=4),
    st.integers(0, 2**70) | JSON,
    st.integers(0, 2**70) | JSON,
    st.sampled_from([*DTYPES, "F128"]),
)


@given(
    st.builds(of_header, st.dictionaries(st.sampled_from("abc"), ENTRIES | JSON) | JSON, st.binary(max_size=40))
    | st.binary(max_size=60)
)
def test_a_forged_shard_is_read_or_refused(tmp_path_factory: Any, data: bytes) -> None:
    path = tmp_path_factory.mktemp("forged") / "shard"
    path.write_bytes(data)
    shard = None
    with suppress(ValueError):
        shard = Shard(path)
    if shard is not None:
        assert sum(tensor.nbytes for tensor in map(shard.read, shard.entries)) <= len(data)
