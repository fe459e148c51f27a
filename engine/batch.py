"""Batch: what one step trains on, cut into microbatches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stagewright.engine.value import Value, pack, unpack


@dataclass(frozen=True, slots=True)
class PerMicrobatch:
    """A keyword argument of the steps that has a value of its own for every microbatch, and is not cut.

    Args:
        members: the i-th goes to all of this rank's stages with microbatch i; any objects, such as caches.
    """

    members: Sequence[Any]


def split(value: Value, num_microbatches: int, name: str) -> list[Value]:
    """Cut every tensor of a value along its first dimension into as many parts, the first ones one row longer
    where the rows do not divide evenly; None stays None.

    Raises:
        ValueError: there are fewer rows than microbatches, or the tensors disagree about the number of rows.
        TypeError: a member is no tensor, tuple, list, dict or None.
    """
    if value is None:
        return [None] * num_microbatches
    rows = num_rows(value, name)
    if rows < num_microbatches:
        raise ValueError(
            f"every microbatch has at least one row: {name} has {rows} rows for {num_microbatches} microbatches; "
            "give a larger batch or fewer microbatches"
        )
    return _split(value, num_microbatches, 0)


def join(outputs: Sequence[Value]) -> Value:
    """Put the values of all microbatches together along the first dimension, in order: the reverse of ``split``.

    Tensors without dimensions become one of as many entries as there are microbatches.

    Raises:
        ValueError: the values are not of one structure.
        TypeError: a member is no tensor, tuple, list, dict or None.
    """
    packed = [pack(output, "the last stage") for output in outputs]
    skeleton = packed[0].layout.skeleton
    for microbatch, part in enumerate(packed):
        if part.layout.skeleton != skeleton:
            raise ValueError(
                f"the outputs of all microbatches are put together, so they must be of one structure: microbatch 0 "
                f"gave {skeleton} and microbatch {microbatch} {part.layout.skeleton}"
            )
    columns = zip(*(part.tensors for part in packed))
    return unpack(skeleton, [torch.cat([_with_rows(tensor) for tensor in column]) for column in columns])


def split_keywords(
    keywords: Mapping[str, Value], num_microbatches: int, split_spec: Mapping[str, int | None]
) -> list[dict[str, Value]]:
    """Cut the tensors among keyword arguments, also those in tuples, lists and dicts, into microbatches; the
    members of a ``PerMicrobatch`` are handed out one each, and everything else goes to each one as it is.

    Args:
        keywords: by name.
        num_microbatches: how many parts to make.
        split_spec: name -> dimension along which to cut, None for a tensor that goes to each microbatch whole;
            tensors that are not named are cut along dimension 0.

    Raises:
        ValueError: a tensor is too short to be cut, a ``PerMicrobatch`` has not one member a microbatch, or
            ``split_spec`` names none of the arguments.
    """
    unknown = set(split_spec) - set(keywords)
    if keywords and unknown == set(split_spec) != set():  # some may be left out, but not all be misspelt
        raise ValueError(f"split_spec names {sorted(unknown)}, but the arguments are {sorted(keywords)}")
    parts: list[dict[str, Any]] = [{} for _ in range(num_microbatches)]
    for name, value in keywords.items():
        dimension = split_spec.get(name, 0)
        if isinstance(value, PerMicrobatch):
            if len(value.members) != num_microbatches:
                raise ValueError(
                    f"a PerMicrobatch has one member a microbatch: {name} has {len(value.members)} for "
                    f"{num_microbatches} microbatches; give {num_microbatches}"
                )
            columns = list(value.members)
        elif dimension is None:
            columns = [value] * num_microbatches
        else:
            for tensor in tensors_of(value):
                _check_cut(tensor, num_microbatches, dimension, name)
            columns = _split(value, num_microbatches, dimension)
        for part, column in zip(parts, columns):
            part[name] = column
    return parts


def num_rows(value: Value, name: str) -> int:
    """The rows of a value: the size of every tensor's first dimension."""
    _check_members(value, name)
    sizes = {_rows_of(tensor, name) for tensor in tensors_of(value)}
    if not sizes:
        raise ValueError(f"{name} holds no tensor, so it has no rows to cut into microbatches")
    if len(sizes) != 1:
        raise ValueError(f"the tensors of {name} must agree about the number of rows: got {sorted(sizes)}")
    return sizes.pop()


def _split(value: Value, num_parts: int, dimension: int) -> list[Any]:
    if isinstance(value, Tensor):
        return [_apart(part) for part in torch.tensor_split(value, num_parts, dimension)]
    if type(value) is dict:
        parts = {key: _split(member, num_parts, dimension) for key, member in value.items()}
        return [{key: part[index] for key, part in parts.items()} for index in range(num_parts)]
    if type(value) is tuple or type(value) is list:
        columns = [_split(member, num_parts, dimension) for member in value]
        return [type(value)(column[index] for column in columns) for index in range(num_parts)]
    return [value] * num_parts


def _apart(part: Tensor) -> Tensor:
    """The same memory under a version counter of its own.

    Views of one batch share one: a stage that overwrites one microbatch would spoil what autograd saved of the others.
    """
    return part if part.requires_grad else part.data


def tensors_of(value: Value) -> list[Tensor]:
    """The tensors of a value, in order; whatever else it holds is left out."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) is dict:
        return [tensor for member in value.values() for tensor in tensors_of(member)]
    if type(value) is tuple or type(value) is list:
        return [tensor for member in value for tensor in tensors_of(member)]
    return []


def _check_members(value: Value, name: str) -> None:
    if value is None or isinstance(value, Tensor):
        return
    if type(value) is not dict and type(value) is not tuple and type(value) is not list:
        raise TypeError(f"{name} is made of tensors, tuples, lists, dicts and None: it holds a {type(value).__name__}")
    for member in value.values() if type(value) is dict else value:
        _check_members(member, name)


def _check_cut(tensor: Tensor, num_microbatches: int, dimension: int, name: str) -> None:
    if not -tensor.ndim <= dimension < tensor.ndim or tensor.shape[dimension] < num_microbatches:
        raise ValueError(
            f"{name} is cut into {num_microbatches} microbatches along dimension {dimension}: its shape is "
            f"{tuple(tensor.shape)}; say split_spec={{{name!r}: None}} to give it to each microbatch whole"
        )


def _with_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim else tensor.reshape(1)


def _rows_of(tensor: Tensor, name: str) -> int:
    if tensor.ndim == 0:
        raise ValueError(f"{name} is cut along its first dimension, but holds a tensor without dimensions")
    return tensor.shape[0]
