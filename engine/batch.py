"""Batch: what one step trains on, cut into microbatches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stagewright.engine.value import Value, pack, unpack


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
    return _split(value, num_microbatches, name)


def join(outputs: Sequence[Value]) -> Value:
    """Put the values of all microbatches together along the first dimension, in order: the reverse of ``split``."""
    packed = [pack(output, "the last stage") for output in outputs]
    tensors = [torch.cat(parts) for parts in zip(*(part.tensors for part in packed))]
    return unpack(packed[0].layout.skeleton, tensors)


def split_keywords(
    keywords: Mapping[str, Value], num_microbatches: int, split_spec: Mapping[str, int | None]
) -> list[dict[str, Value]]:
    """Cut the tensors among keyword arguments into microbatches; everything else goes to each one as it is.

    Args:
        keywords: by name.
        num_microbatches: how many parts to make.
        split_spec: name -> dimension along which to cut, None for a tensor that goes to each microbatch whole;
            tensors that are not named are cut along dimension 0.

    Raises:
        ValueError: a tensor is too short to be cut, or ``split_spec`` names no argument.
    """
    unknown = set(split_spec) - set(keywords)
    if keywords and unknown:
        raise ValueError(f"split_spec names {sorted(unknown)}, but the arguments are {sorted(keywords)}")
    parts: list[dict[str, Any]] = [{} for _ in range(num_microbatches)]
    for name, value in keywords.items():
        dimension = split_spec.get(name, 0)
        if not isinstance(value, Tensor) or dimension is None:
            columns: Any = [value] * num_microbatches
        else:
            if value.ndim <= dimension or value.shape[dimension] < num_microbatches:
                raise ValueError(
                    f"{name} is cut into {num_microbatches} microbatches along dimension {dimension}: its shape is "
                    f"{tuple(value.shape)}; say split_spec={{{name!r}: None}} to give it to each microbatch whole"
                )
            columns = torch.tensor_split(value, num_microbatches, dimension)
        for part, column in zip(parts, columns):
            part[name] = column
    return parts


def num_rows(value: Value, name: str) -> int:
    """The rows of a value: the size of every tensor's first dimension."""
    sizes = {_rows_of(tensor, name) for tensor in _tensors(value, name)}
    if len(sizes) != 1:
        raise ValueError(f"the tensors of {name} must agree about the number of rows: got {sorted(sizes)}")
    return sizes.pop()


def _split(value: Value, num_parts: int, name: str) -> list[Any]:
    if isinstance(value, Tensor):
        return list(torch.tensor_split(value, num_parts))
    if value is None:
        return [None] * num_parts
    if isinstance(value, dict):
        parts = {key: _split(member, num_parts, name) for key, member in value.items()}
        return [{key: part[index] for key, part in parts.items()} for index in range(num_parts)]
    columns = [_split(member, num_parts, name) for member in value]
    return [type(value)(column[index] for column in columns) for index in range(num_parts)]


def _tensors(value: Value, name: str) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if value is None:
        return []
    if type(value) is dict:
        return [tensor for member in value.values() for tensor in _tensors(member, name)]
    if type(value) is tuple or type(value) is list:
        return [tensor for member in value for tensor in _tensors(member, name)]
    raise TypeError(f"{name} is made of tensors, tuples, lists, dicts and None: it holds a {type(value).__name__}")


def _rows_of(tensor: Tensor, name: str) -> int:
    if tensor.ndim == 0:
        raise ValueError(f"{name} is cut along its first dimension, but holds a tensor without dimensions")
    return tensor.shape[0]
