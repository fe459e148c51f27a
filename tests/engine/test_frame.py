"""Frames: what is read is what was written, to the bit; and what is no frame is refused by a ValueError."""

import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagewright.engine.errors import PeerError
from stagewright.engine.transport import frame as wire
from stagewright.engine.transport.frame import FIRST_CAPACITY, HEADER_SIZE, MESSAGE, FrameCodec
from stagewright.engine.value import pack, unpack

CPU = torch.device("cpu")
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
)
SOURCE = 3


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int, form: str) -> Tensor:
    """Any bits at all, in memory of any form."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(0, high, (size,), generator=generator, dtype=torch.uint8)
    tensor = data.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    match form:
        case "transposed":
            return tensor.T if tensor.ndim == 2 else tensor
        case "expanded":
            return tensor[:1].expand(shape) if tensor.ndim and shape[0] else tensor
        case "with gaps":
            return tensor[::2] if tensor.ndim else tensor
        case "conjugated":
            return tensor.conj() if tensor.is_complex() else tensor
        case "differentiable":
            return tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        case _:
            return tensor


tensors = st.builds(
    random_tensor,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.integers(0, 2**31),
    st.sampled_from(["plain", "transposed", "expanded", "with gaps", "conjugated", "differentiable"]),
)
values = st.recursive(
    tensors | st.none(),
    lambda members: (
        st.lists(members, max_size=4)
        | st.lists(members, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), members, max_size=4)
    ),
    max_leaves=8,
)


def bits(tensor: Tensor) -> bytes:
    if not tensor.numel():
        return b""
    copy = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
    return bytes(copy.view(-1).view(torch.uint8).numpy().data)


def assert_same_value(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs) or (isinstance(ours, Tensor) and isinstance(theirs, Tensor))
    match ours:
        case Tensor():
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert bits(ours) == bits(theirs)
        case dict():
            assert list(ours) == list(theirs)  # the order of the keys too
            for key in ours:
                assert_same_value(ours[key], theirs[key])
        case list() | tuple():
            assert len(ours) == len(theirs)
            for one, other in zip(ours, theirs):
                assert_same_value(one, other)


def read(codec: FrameCodec, frame: Tensor, stage: int = 2, microbatch: int = 5) -> Any:
    """As the transport does: the length of the head first, then the whole."""
    head = frame if frame.numel() >= HEADER_SIZE else torch.cat([frame, torch.zeros(HEADER_SIZE, dtype=torch.uint8)])
    num_bytes = codec.num_bytes(head.numpy().data, SOURCE)
    if num_bytes > head.numel():
        head = codec.enlarged(head, num_bytes, SOURCE)
    return codec.read(head.numpy().data, stage, microbatch, SOURCE)


@given(values)
def test_round_trip(value: Any) -> None:
    writer, reader = FrameCodec(CPU), FrameCodec(CPU)
    packed = pack(value, "stage 1")
    for _ in range(2):  # the second time both know the layout
        received = read(reader, writer.write(packed, 2, 5))
        assert received.layout == packed.layout
        assert not any(tensor.requires_grad for tensor in received.tensors)
        assert_same_value(unpack(received.layout.skeleton, received.tensors), value)


def test_a_receive_buffer_may_be_larger_than_its_message() -> None:
    codec = FrameCodec(CPU)
    frame = codec.write(pack(torch.arange(10), "stage 1"), 2, 5)
    buffer = torch.full((FIRST_CAPACITY,), 0xAB, dtype=torch.uint8)
    buffer[: frame.numel()] = frame
    assert read(codec, buffer).tensors[0].tolist() == list(range(10))


def test_tensors_of_one_message_change_in_place_independently() -> None:
    codec = FrameCodec(CPU)
    packed = pack((torch.ones(3), torch.ones(3)), "stage 1")
    first, second = read(codec, codec.write(packed, 2, 5)).tensors
    weight = torch.ones(3, requires_grad=True)
    product = (second * weight).sum()  # keeps the second for the backward
    first.add_(1)
    product.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1, 1]
    assert second.tolist() == [1, 1, 1]


def test_tensors_stay_where_they_lie() -> None:
    """No copy on the receiver's side, and aligned for whatever reads them."""
    codec = FrameCodec(CPU)
    frame = codec.write(pack([torch.ones(3), torch.ones(5, dtype=torch.float64)], "stage 1"), 2, 5)
    for tensor in read(codec, frame).tensors:
        assert 0 < tensor.data_ptr() - frame.data_ptr() < frame.numel()
        assert tensor.data_ptr() % 64 == 0


def test_another_message_than_expected_is_refused() -> None:
    codec = FrameCodec(CPU)
    frame = codec.write(pack(torch.ones(2), "stage 1"), 2, 5)
    with pytest.raises(ValueError, match="rank 3 sent microbatch 5 for stage 2, expected was microbatch 6 for stage 2"):
        read(codec, frame, 2, 6)


@pytest.mark.parametrize("num_layouts", [2000])
def test_layouts_remembered_do_not_pile_up(num_layouts: int) -> None:
    writer, reader = FrameCodec(CPU), FrameCodec(CPU)
    for size in range(num_layouts):
        read(reader, writer.write(pack(torch.empty(size), "stage 1"), 2, 5))
        for codec in (writer, reader):
            assert len(codec._by_layout) <= 256
            assert len(codec._by_text) <= 256


def test_one_layout_in_many_spellings_does_not_pile_up() -> None:
    codec = FrameCodec(CPU)
    for spaces in range(1000):
        read(codec, crafted(b'["n",[],[],[]]' + b" " * spaces))
        assert len(codec._by_text) <= 256


# Damage


def damaged(frame: Tensor, position: int, flip: int) -> Tensor:
    copy = frame.clone()
    copy[position] ^= flip
    return copy


@given(values, st.data())
def test_a_damaged_header_or_layout_is_refused(value: Any, data: st.DataObject) -> None:
    codec = FrameCodec(CPU)
    frame = codec.write(pack(value, "stage 1"), 2, 5)
    end = HEADER_SIZE + len(next(iter(codec._by_text)))
    broken = damaged(frame, data.draw(st.integers(0, end - 1)), data.draw(st.integers(1, 255)))
    with pytest.raises(ValueError, match="rank 3"):
        read(codec, broken)


@given(st.binary(min_size=HEADER_SIZE, max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(ValueError, match="rank 3"):
        read(FrameCodec(CPU), torch.frombuffer(bytearray(noise), dtype=torch.uint8))


def test_a_message_shorter_than_a_header_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 3"):
        read(FrameCodec(CPU), torch.zeros(5, dtype=torch.uint8))


# Lies: frames whose checksums hold


def crafted(text: bytes, num_bytes: int | None = None, payload: bytes = b"", text_length: int | None = None) -> Tensor:
    """A frame that says whatever one likes, with checksums that hold."""
    if num_bytes is None:
        num_bytes = HEADER_SIZE + len(text) + len(payload)
    length = len(text) if text_length is None else text_length
    fields = wire._FIELDS.pack(MESSAGE, 2, 5, length, zlib.crc32(text), num_bytes)
    data = fields + wire._CHECKSUM.pack(zlib.crc32(fields)) + text + payload
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def refusal(frame: Tensor) -> str | None:
    """The ValueError that comes of reading a frame; None where it can be read. Any other error goes through."""
    try:
        received = read(FrameCodec(CPU), frame)
        unpack(received.layout.skeleton, received.tensors)
    except ValueError as error:
        return str(error)
    return None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["t", "n", "list", "tuple", "dict", "a"]),
    lambda members: st.lists(members, max_size=4) | st.dictionaries(st.text(max_size=2), members, max_size=2),
    max_leaves=10,
)
layouts = st.tuples(
    json_values | st.sampled_from(["t", "n", ["list", "t", "t"], ["dict", ["a"], "t"], ["dict", ["a", "a"], "t", "t"]]),
    st.lists(st.sampled_from(["float32", "int64", "bool", "object", "float128"]), max_size=3) | json_values,
    st.lists(st.lists(st.integers(-1, 9) | st.just(2**62), max_size=3), max_size=3) | json_values,
    st.lists(st.booleans(), max_size=3) | json_values,
)


@settings(max_examples=300)
@given(
    (layouts.map(list) | json_values).map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60),
    st.binary(max_size=200),
)
@example(b'["t",["float32"],[[0,4611686018427387904,4]],[false]]', b"")
@example(b'["t",["float32"],[[4611686018427387904,4]],[false]]', b"")
@example(b'["t",["float32"],[[36893488147419103232,0]],[false]]', b"")
@example(b'["t",["float32"],[[-1,4]],[false]]', b"")
@example(b'["t",[["float32"]],[[1]],[false]]', b"")
@example(b'["t",["float32"],[[1.0]],[false]]', b"")
@example(b'["t",["float32"],[[true]],[false]]', b"")
@example(b'["t",["float32","float32"],[[1]],[false]]', b"")
@example(b"[" * 100_000, b"")
@example(b"1" * 5000, b"")
@example(b'"\xff"', b"")
def test_a_layout_that_does_not_hang_together_is_refused(text: bytes, payload: bytes) -> None:
    assert "rank 3" in (refusal(crafted(text, payload=payload)) or "rank 3")


@pytest.mark.parametrize(
    "text",
    [
        b'["t",["float32"],[[0,4611686018427387904,4]],[false]]',  # more than torch can count
        b'["t",["float32"],[[-1,4]],[false]]',
        b'["t",["float128"],[[1]],[false]]',
        b'["t",["float32"],[[1.0]],[false]]',
        b'["t",["float32","float32"],[[1],[1]],[false,false]]',  # two tensors for a place of one
        b'["dict",["a"],"n","n"]',
        b"[" * 100_000,
        b"",
    ],
)
def test_absurd_layouts_are_refused(text: bytes) -> None:
    assert "rank 3" in (refusal(crafted(text, payload=bytes(256))) or "")


@pytest.mark.parametrize("num_bytes", [0, HEADER_SIZE - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_wrong_length_is_refused_however_large(num_bytes: int) -> None:
    assert "rank 3" in (refusal(crafted(b'["t",["uint8"],[[10]],[false]]', num_bytes=num_bytes)) or "")


def test_a_length_that_the_layout_does_not_bear_out_is_refused() -> None:
    text = b'["t",["uint8"],[[10]],[false]]'  # 30 bytes after a header of 32: the tensor lies at 64
    for payload in (bytes(100), bytes(200)):
        assert "but describes 74" in (refusal(crafted(text, payload=payload)) or "")


def test_a_layout_longer_than_its_message_is_refused() -> None:
    assert "rank 3" in (refusal(crafted(b'["n",[],[],[]]', text_length=2**31)) or "")


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "boom")


def test_nothing_in_a_frame_is_executed(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "boom"))
    for text in (bomb, json.dumps(["t", ["__import__('os')"], [[]], [False]]).encode()):
        assert "rank 3" in (refusal(crafted(text)) or "")
    payload = torch.frombuffer(bytearray(bomb), dtype=torch.uint8)
    codec = FrameCodec(CPU)
    assert read(codec, codec.write(pack(payload, "stage 1"), 2, 5)).tensors[0].tolist() == list(bomb)
    assert not (tmp_path / "boom").exists()


# Failures


@pytest.mark.parametrize("reason", ["rank 1 failed at 2F0 (step 3): ValueError: bad", "ü" * 10_000, ""])
def test_a_failure_takes_the_place_of_any_message(reason: str) -> None:
    codec = FrameCodec(CPU)
    frame = codec.write_failure(reason)
    assert frame.numel() <= FIRST_CAPACITY, "it fits into every receive"
    with pytest.raises(PeerError) as caught:
        read(codec, frame)
    assert str(caught.value).rstrip("\N{REPLACEMENT CHARACTER}") == reason[: len(str(caught.value))].rstrip()
