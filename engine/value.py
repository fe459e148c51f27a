"""Values: what a stage hands to the next one, taken apart into tensors and a layout."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

# A tensor, None, or a tuple, list or dict of values in any nesting.
Value: TypeAlias = Any

# The shape of a value without its tensors: "t" is a tensor, "n" is None, ("again", i) is the i-th tensor once more, a
# container is its kind and its members.
Skeleton: TypeAlias = str | tuple[Any, ...]

# The types of what crosses, by name, and how deep a value may be nested.
DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.bool, torch.complex64, torch.complex128),
    )
}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
MAX_NESTING: Final = 64
_CROSSING: Final = (Tensor, nn.Parameter)
_ALONE: Final = ("list", "t")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a value is put together, hashable and without any data.

    Args:
        skeleton: its containers.
        dtypes, shapes, differentiable: one entry a tensor; the last says whether a gradient comes back for it.
    """

    skeleton: Skeleton
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    differentiable: tuple[bool, ...]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(dtype.itemsize * prod(shape) for dtype, shape in zip(self.dtypes, self.shapes))


@dataclass(frozen=True, slots=True)
class Packed:
    """A value as its layout and its tensors, in order."""

    layout: Layout
    tensors: Sequence[Tensor]


def pack(value: Value, owner: str, name: str = "output", known: Layout | None = None) -> Packed:
    """Take a value apart.

    Args:
        value: what a stage returned.
        owner: whose value it is, for the error.
        name: what it is.
        known: the layout of one like it, which need not be made again where it is the same.

    Raises:
        TypeError: a member is no tensor, tuple, list, dict or None; its path and type are named.
    """
    if isinstance(value, Tensor) and not value.is_nested:
        return Packed(_layout_of("t", value, known), (value,))
    tensors: list[Tensor] = []
    skeleton = _take_apart(value, tensors, {}, owner, name)
    layout = Layout(
        skeleton,
        tuple(tensor.dtype for tensor in tensors),
        tuple(tuple(tensor.shape) for tensor in tensors),
        tuple(tensor.requires_grad for tensor in tensors),
    )
    return Packed(layout, tensors)


def pack_gradients(gradients: Sequence[Tensor | None], known: Layout | None = None) -> Packed:
    """Gradients as a message: a list with a tensor or nothing an entry.

    Args:
        gradients: one for each tensor that wants one.
        known: as for ``pack``.
    """
    if len(gradients) == 1 and gradients[0] is not None:
        return Packed(_layout_of(_ALONE, gradients[0], known), (gradients[0],))
    return pack(list(gradients), "a backward")


def unpack_gradients(packed: Packed) -> Sequence[Tensor | None]:
    """The reverse of ``pack_gradients``."""
    if packed.layout.skeleton == _ALONE:
        return packed.tensors
    gradients: Sequence[Tensor | None] = unpack(packed.layout.skeleton, packed.tensors)
    return gradients


def _layout_of(skeleton: Skeleton, tensor: Tensor, known: Layout | None) -> Layout:
    """The layout of a value with a single tensor."""
    if (
        known is not None
        and known.skeleton == skeleton
        and known.dtypes[0] is tensor.dtype
        and known.shapes[0] == tensor.shape
        and known.differentiable[0] is tensor.requires_grad
    ):
        return known
    return Layout(skeleton, (tensor.dtype,), (tuple(tensor.shape),), (tensor.requires_grad,))


def pack_input(value: Value) -> Packed:
    """Take the user's input of one microbatch apart: no gradient goes back for it."""
    packed = pack(value, "the batch", "x")
    layout = packed.layout
    plain = Layout(layout.skeleton, layout.dtypes, layout.shapes, (False,) * len(layout.differentiable))
    return Packed(plain, packed.tensors)


def unpack(skeleton: Skeleton, tensors: Sequence[Tensor]) -> Value:
    """Put a value together again; the reverse of ``pack``."""
    if skeleton == "t":
        return tensors[0]
    return _put_together(skeleton, tensors, iter(tensors))


def check_crossing(packed: Packed, owner: str, name: str = "output") -> None:
    """Refuse tensors that could not be made again elsewhere from their type, shape and numbers.

    Args:
        packed: a value.
        owner, name: as for ``pack``.

    Raises:
        TypeError: a tensor is sparse, of a type that no message has, or of a subclass with a life of its own.
    """
    for index, tensor in enumerate(packed.tensors):
        dense = tensor.layout is torch.strided and not tensor.is_meta
        if type(tensor) in _CROSSING and dense and tensor.dtype in NAMES:
            continue
        path = list(_paths(packed.layout.skeleton, name))[index]
        kind = f"tensor of {tensor.layout}, {tensor.dtype}" + (", without data" if tensor.is_meta else "")
        kind = kind if type(tensor) in _CROSSING else type(tensor).__name__
        raise TypeError(
            f"{path} of {owner} is a {kind}: what crosses to another stage is a dense, plain tensor of one of the "
            f"types {', '.join(DTYPES)}; convert it"
        )


def _paths(skeleton: Skeleton, path: str) -> Iterator[str]:
    """Where each tensor stands in a value."""
    match skeleton:
        case "t":
            yield path
        case ("again", _):
            return
        case ("dict", keys, *members):
            for key, member in zip(keys, members):
                yield from _paths(member, f"{path}[{key!r}]")
        case (_, *members):
            for index, member in enumerate(members):
                yield from _paths(member, f"{path}[{index}]")


def _take_apart(
    value: Value, tensors: list[Tensor], seen: dict[int, int], owner: str, path: str, depth: int = 0
) -> Skeleton:
    if depth > MAX_NESTING:
        raise TypeError(f"{path} of {owner} is nested deeper than {MAX_NESTING}: pass a flatter value on")
    if isinstance(value, Tensor) and not value.is_nested:
        index = seen.setdefault(id(value), len(tensors))
        if index < len(tensors):
            return ("again", index)
        tensors.append(value)
        return "t"
    if value is None:
        return "n"
    kind = type(value)
    if kind is tuple or kind is list:
        members = (
            _take_apart(member, tensors, seen, owner, f"{path}[{index}]", depth + 1)
            for index, member in enumerate(value)
        )
        return ("tuple" if kind is tuple else "list", *members)
    if kind is dict:
        for key in value:
            if type(key) is not str and type(key) is not int:
                raise TypeError(
                    f"{path} of {owner} has the key {key!r}, a {type(key).__name__}: the keys of a dict that crosses "
                    "to another stage are str or int"
                )
        members = (
            _take_apart(member, tensors, seen, owner, f"{path}[{key!r}]", depth + 1) for key, member in value.items()
        )
        return ("dict", tuple(value), *members)
    name = "nested tensor" if isinstance(value, Tensor) else kind.__name__
    raise TypeError(
        f"{path} of {owner} is a {name}: what crosses to another stage is a plain tensor, tuple, list, dict or None; "
        "turn it into one of these"
    )


def _put_together(skeleton: Skeleton, tensors: Sequence[Tensor], new: Iterator[Tensor]) -> Value:
    match skeleton:
        case "t":
            return next(new)
        case "n":
            return None
        case ("again", int(index)):
            return tensors[index]
        case ("tuple", *members):
            return tuple(_put_together(member, tensors, new) for member in members)
        case ("list", *members):
            return [_put_together(member, tensors, new) for member in members]
        case ("dict", keys, *members):
            return {key: _put_together(member, tensors, new) for key, member in zip(keys, members)}
        case _:
            raise ValueError(f"{skeleton!r} is no skeleton of a value")
