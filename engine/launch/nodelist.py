"""Nodelist: the names of machines as SLURM writes them, such as ``node[01-03,07],gpu2``."""

import re
from typing import Final

LONGEST: Final = 1_000_000  # characters; the system itself gives a variable no more than about 130 000
LONGEST_NUMBER: Final = 18  # digits
# One machine or several that differ by numbers: text and brackets in turn.
_PATTERN: Final = re.compile(r"(?:[^\[\],\s]|\[[0-9,-]+\])+")
_BRACKETS: Final = re.compile(r"\[([0-9,-]+)\]")
_NUMBERS: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def first_node(text: str) -> tuple[str, bool]:
    """The first machine of a list, and whether it is the only one. No other one is written out: there may be many.

    Raises:
        ValueError: the list is not of this form.
    """
    if len(text) > LONGEST:
        raise ValueError(f"a list of nodes has at most {LONGEST} characters: got {len(text)}")
    patterns = _PATTERN.findall(text)
    if not patterns or ",".join(patterns) != text:
        raise ValueError(f"a list of nodes looks like node[01-03,07],gpu2: got {_shown(text)}")
    name, is_only = "", len(patterns) == 1
    for pattern in reversed(patterns):  # all are checked, and the first one stays
        between, inside = _BRACKETS.split(pattern)[::2], _BRACKETS.split(pattern)[1::2]
        name = between[0]
        for numbers, after in zip(inside, between[1:]):
            number, is_alone = _first_number(numbers, text)
            name += number + after
            is_only = is_only and is_alone
    return name, is_only


def _first_number(numbers: str, text: str) -> tuple[str, bool]:
    """The first number of what is in brackets, such as ``01-16,20``, as it is written; and whether it is the only one.

    A range is as wide as its first number, so that one is written as it stands.
    """
    items = [_range(item, text) for item in numbers.split(",")]
    first, last = items[0]
    return first, len(items) == 1 and int(first) == int(last)


def _range(item: str, text: str) -> tuple[str, str]:
    matched = _NUMBERS.fullmatch(item)
    first, last = (matched[1], matched[2] or matched[1]) if matched else ("1", "0")
    if max(len(first), len(last)) > LONGEST_NUMBER:
        raise ValueError(f"numbers of nodes have at most {LONGEST_NUMBER} digits: got {_shown(item)}")
    if int(last) < int(first):
        raise ValueError(f"numbers of nodes rise, as in 01-16: got {_shown(item)} in {_shown(text)}")
    return first, last


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")
