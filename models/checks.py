"""Checks: whether what was given is of the right kind, before anything is computed with it."""

from collections.abc import Iterable, Mapping, Set
from math import inf
from numbers import Integral, Real


def whole_number(value: object, what: str) -> int:
    """A whole number of whatever type. Raises `TypeError` for anything else, also for True and 2.0."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{what} must be a whole number: got {shown(value)}; pass one such as 4")
    return int(value)


def finite_number(value: object, what: str) -> float:
    """A finite number of 0 or more. Raises `TypeError` for what is no number, `ValueError` for any other one."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{what} must be a number: got {shown(value)}; pass one such as 1.5")
    try:
        number = float(value)
    except OverflowError:
        number = inf
    if not 0 <= number < inf:
        raise ValueError(f"a cost is a finite number of 0 or more: got {shown(value)} for {what}; measure it anew")
    return number


def in_order(values: object, what: str) -> tuple[object, ...]:
    """Several things in order. Raises `TypeError` for a text, or what has no order."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping | Set):
        raise TypeError(f"{what}: got {shown(values)}; pass a list or tuple")
    return tuple(values)


def shown(value: object) -> str:
    """Something as it is written, its beginning where that is long."""
    text = f"{type(value).__name__} {value!r}" if not isinstance(value, int | float | str | None) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
