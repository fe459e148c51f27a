"""Writing: a layout as text, as it goes over the wire and is never believed when it comes back."""

import json
from typing import Any

from stagewright.engine.value import DTYPES, MAX_NESTING, NAMES, Layout, Skeleton


def write_layout(layout: Layout) -> bytes:
    """A layout as JSON, for the wire."""
    names = [NAMES[dtype] for dtype in layout.dtypes]
    return json.dumps([layout.skeleton, names, layout.shapes, layout.differentiable], separators=(",", ":")).encode()


def read_layout(text: bytes) -> Layout:
    """Read a layout from the wire.

    Raises:
        ValueError: the text is no layout, or one that does not hang together.
    """
    try:
        skeleton, names, shapes, differentiable = json.loads(text.decode())
        layout = Layout(
            _checked_skeleton(skeleton, len(names)),
            tuple(DTYPES[name] for name in names),
            tuple(tuple(_checked_size(size) for size in shape) for shape in shapes),
            tuple(bool(flag) for flag in differentiable),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"a message describes itself in a way that cannot be read: {error}") from error
    num_tensors = {_count(layout.skeleton), len(layout.dtypes), len(layout.shapes), len(layout.differentiable)}
    if len(num_tensors) != 1:
        raise ValueError("a message contradicts itself about how many tensors it holds")
    return layout


def _checked_skeleton(skeleton: Any, num_tensors: int, depth: int = 0) -> Skeleton:
    """JSON has no tuples: restore them, and refuse what no ``pack`` has written."""
    if depth > MAX_NESTING:
        raise ValueError(f"a value is nested deeper than {MAX_NESTING}")
    match skeleton:
        case "t" | "n":
            return str(skeleton)
        case ["again", int(index)] if 0 <= index < num_tensors:
            return ("again", index)
        case ["tuple" | "list" as kind, *members]:
            return (kind, *(_checked_skeleton(member, num_tensors, depth + 1) for member in members))
        case ["dict", [*keys], *members] if len(keys) == len(members):
            if any(type(key) is not str and type(key) is not int for key in keys):
                raise ValueError("a dict key is neither str nor int")
            return ("dict", tuple(keys), *(_checked_skeleton(member, num_tensors, depth + 1) for member in members))
        case _:
            raise ValueError(f"{skeleton!r} is no skeleton of a value")


def _checked_size(size: Any) -> int:
    if type(size) is not int or size < 0:
        raise ValueError(f"{size!r} is no size of a dimension")
    return size


def _count(skeleton: Skeleton) -> int:
    match skeleton:
        case "t":
            return 1
        case "n" | ("again", _):
            return 0
        case ("dict", _, *members):
            return sum(map(_count, members))
        case (_, *members):
            return sum(map(_count, members))
        case _:
            return 0
