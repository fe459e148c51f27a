"""Nodelist: the names of machines as SLURM writes them, such as ``node[01-03,07],gpu2``."""

import re
from itertools import product
from typing import Final

# One machine or several that differ by numbers: text and brackets in turn.
_PATTERN: Final = re.compile(r"(?:[^\[\],\s]|\[[\d,-]+\])+")
_BRACKETS: Final = re.compile(r"\[([\d,-]+)\]")
_NUMBERS: Final = re.compile(r"(\d+)(?:-(\d+))?")


def expand_nodelist(text: str) -> tuple[str, ...]:
    """Every machine of a list, in its order.

    Raises:
        ValueError: the list is not of this form.
    """
    patterns = _PATTERN.findall(text)
    if not patterns or ",".join(patterns) != text:
        raise ValueError(f"a list of nodes looks like node[01-03,07],gpu2: got {text!r}")
    return tuple(node for pattern in patterns for node in _expand(pattern, text))


def _expand(pattern: str, text: str) -> list[str]:
    """Every machine of a pattern such as ``rack[1-2]node[01-16]``, the last numbers changing fastest."""
    between, inside = _BRACKETS.split(pattern)[::2], _BRACKETS.split(pattern)[1::2]
    choices = [[between[0]]]
    for numbers, after in zip(inside, between[1:]):
        choices.append([number + after for item in numbers.split(",") for number in _count(item, text)])
    return ["".join(chosen) for chosen in product(*choices)]


def _count(item: str, text: str) -> list[str]:
    """The numbers of a range such as ``01-16``, as wide as its first one."""
    matched = _NUMBERS.fullmatch(item)
    first, last = (matched[1], matched[2] or matched[1]) if matched else ("1", "0")
    if int(last) < int(first):
        raise ValueError(f"numbers of nodes rise, as in 01-16: got {item!r} in {text!r}")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
