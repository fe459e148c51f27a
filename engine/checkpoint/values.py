"""Checkpoint, values: what optimizers, schedulers and trainers remember, as JSON beside tensors; nothing is pickled.

JSON has no tuples, no keys but strings and no infinities. Such a value becomes an object with one key that says what
it was: ``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}``, ``{"tensor": name}``, ``{"float": "inf"}``, ….
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from stagewright.engine.checkpoint.shards import DTYPES, check_plain

_DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON.

    Args:
        value: of numbers, texts, tensors, lists, tuples and dicts, in any nesting.
        name: by which to name the tensors in it.
        tensors: gets them, by the names that stand in their place.

    Raises:
        ValueError: it has something else in it.
    """
    match value:
        case None | bool() | str():
            return value
        case int() | float() if type(value) in (int, float):
            return value if type(value) is int or math.isfinite(value) else {"float": repr(value)}
        case Tensor():
            check_plain(name, value)
            while name in tensors:  # as where keys are 1 and "1"
                name += "'"
            tensors[name] = value
            return {"tensor": name}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case list():
            return [encode(member, f"{name}/{index}", tensors) for index, member in enumerate(value)]
        case tuple():
            return {"tuple": encode(list(value), name, tensors)}
        case Mapping():
            pairs = [
                [encode(key, f"{name}/key", tensors), encode(member, f"{name}/{key}", tensors)]
                for key, member in value.items()
            ]
            return {"counter" if isinstance(value, Counter) else "dict": pairs}
        case _:
            raise ValueError(
                f"a checkpoint keeps numbers, texts, tensors, lists, tuples and dicts of them: {name} is a "
                f"{type(value).__name__}, which only pickle could keep, and pickles run code"
            )


def decode(value: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """The value that was encoded.

    Args:
        value: what ``encode`` returned.
        tensor_of: reads a tensor by its name.

    Raises:
        ValueError: nothing is encoded like that.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [decode(member, tensor_of) for member in value]
        case dict() if len(value) != 1:
            raise ValueError(f"no value is written as {value!s:.100}")
        case {"tensor": str(name)}:
            return tensor_of(name)
        case {"tuple": list(members)}:
            return tuple(decode(member, tensor_of) for member in members)
        case {"dict": list(pairs)}:
            return _dict(pairs, tensor_of)
        case {"counter": list(pairs)}:
            counted = _dict(pairs, tensor_of)
            if not all(isinstance(number, int) for number in counted.values()):
                raise ValueError("a counter counts")
            return Counter(counted)
        case {"float": "inf" | "-inf" | "nan" as text}:
            return float(text)
        case {"dtype": str(name)} if name in _DTYPES:
            return _DTYPES[name]
        case _:
            raise ValueError(f"no value is written as {value!s:.100}")


def _dict(pairs: list[Any], tensor_of: Callable[[str], Tensor]) -> dict[Any, Any]:
    decoded = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"a dict is written as pairs of key and value: got {pair!s:.100}")
        key = decode(pair[0], tensor_of)
        try:
            decoded[key] = decode(pair[1], tensor_of)
        except TypeError as error:
            raise ValueError(f"{key!s:.100} cannot be a key") from error
    return decoded
