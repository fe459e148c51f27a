"""Meta: how a module that was built on the meta device gets memory, and whether all of it has values then."""

from collections.abc import Iterator, Mapping
from math import nan
from typing import Final

import torch
from torch import Tensor, nn

_REGISTERED: Final = ("_parameters", "_buffers", "_modules")
# Types of one byte that can be filled; others, such as float8, cannot everywhere.
_BYTES: Final = (torch.bool, torch.uint8, torch.int8)


def materialise(module: nn.Module) -> list[str]:
    """Give what is on the meta device memory on the CPU, still without values; return the modules that need them.

    Unlike `Module.to_empty`, a parameter that two modules share is one parameter afterwards too. Tensors that are
    neither parameter nor buffer stay where they are.
    """
    made: dict[Tensor, Tensor] = {}
    names = []
    for name, owner in module.named_modules():
        slots = [*owner._parameters.items(), *owner._buffers.items()]
        on_meta = {slot: tensor for slot, tensor in slots if tensor is not None and tensor.is_meta}
        for slot, tensor in on_meta.items():
            if tensor not in made:
                made[tensor] = blank(torch.empty_like(tensor, device="cpu"))
                if isinstance(tensor, nn.Parameter):
                    made[tensor] = nn.Parameter(made[tensor], requires_grad=tensor.requires_grad)
            setattr(owner, slot, made[tensor])  # so that an LSTM, which has a list of its own too, hears of it
        if on_meta or any(tensor.is_meta for _, tensor in loose_tensors(owner)):
            names.append(name)
    return names


def check_real(module: nn.Module) -> None:
    """Raise `ValueError` for a tensor that is still on the meta device."""
    for name, owner in module.named_modules():
        left = [attribute for attribute, tensor in loose_tensors(owner) if tensor.is_meta]
        if left:
            raise ValueError(
                f"a module built on the meta device fills itself: {name}, a {type(owner).__name__}, has in "
                f"{', '.join(dict.fromkeys(left))} what is neither parameter nor buffer, and is not filled; let "
                "reset_parameters fill a registered buffer, or build the model with memory"
            )


def loose_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """What a module has, by attribute, that is neither parameter nor buffer: by itself, or in a list or the like."""
    registered = {
        id(tensor) for part in module.modules() for tensor in (*part._parameters.values(), *part._buffers.values())
    }
    return [
        (attribute, tensor)
        for attribute, value in vars(module).items()
        if attribute not in _REGISTERED
        for tensor in _tensors_in(value, set())
        if id(tensor) not in registered
    ]


def blank(tensor: Tensor) -> Tensor:
    """Fill a tensor with what no initialisation leaves, so that one that does not fill it is found out."""
    with torch.no_grad():
        return tensor.fill_(_blank_value(tensor.dtype)) if _can_be_blank(tensor.dtype) else tensor


def is_blank(tensor: Tensor) -> bool:
    """Whether a tensor still is, by its first numbers, as `blank` has left it."""
    first = tensor.detach().flatten()[:64]
    if not first.numel() or not _can_be_blank(tensor.dtype):
        return False
    value = _blank_value(tensor.dtype)
    return bool((first.isnan() if value is nan else first == value).all())


def _can_be_blank(dtype: torch.dtype) -> bool:
    return dtype.itemsize > 1 or dtype in _BYTES


def _blank_value(dtype: torch.dtype) -> float:
    """No number; the lowest one of integers, or the highest where that is 0."""
    if dtype.is_floating_point or dtype.is_complex:
        return nan
    if dtype == torch.bool:
        return True
    limits = torch.iinfo(dtype)
    return limits.min or limits.max


def _tensors_in(value: object, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in a nesting of lists, tuples, sets, dicts and modules."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, list | tuple | set | frozenset | Mapping) and id(value) not in seen:
        seen.add(id(value))
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(member, seen)
