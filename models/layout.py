"""Cuts as text, in Megatron's notation for `--pipeline-model-parallel-layout`.

`Et*3|(tt|)*29,m|L` are 32 stages: an embedding and three layers; 29 times two layers; what predicts more than one
token ahead; the loss. `E` is the embedding, `t` a transformer layer, `m` a multi-token-prediction layer, `L` head and
loss, `|` goes between stages, `*n` repeats the letter or the group in parentheses before it, commas say nothing.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Final

from stagewright.models.checks import shown, whole_number
from stagewright.models.cut import Cut, Kind, Part, check_enough, check_parts, check_whole, count_layers

LETTERS: Final[dict[Kind, str]] = {"embedding": "E", "layer": "t", "head": "L"}
LONGEST: Final = 100_000
_TOKEN: Final = re.compile(r"([Et|mL])|(\()|(\))|\*([0-9]+)")


def cut_by_layout(parts: Sequence[Part], layout: str, num_stages: int | None = None) -> Cut:
    """Cut a model as a layout says.

    Any stage may be without a layer but none without a part, and there are at least as many layers as stages. Raises
    `ValueError` for a layout that cannot be read, has an empty stage, has more stages than layers, is not that of this
    model, or (where `num_stages` says how many are wanted) of other than so many stages.
    """
    check_parts(parts)
    if not isinstance(layout, str):
        raise TypeError(f"a layout is a text such as Et|tt|tL: got {shown(layout)}; write it so")
    expanded = expand(layout)
    if "m" in expanded:
        raise ValueError(
            f"m is a multi-token-prediction layer, and this model has none: got {layout!r}; leave the m out"
        )
    stages = expanded.split("|")
    if num_stages is not None and len(stages) != whole_number(num_stages, "the number of stages"):
        raise ValueError(
            f"a layout says what each of {num_stages} stages holds: got {len(stages)} in {layout!r}; "
            f"use {num_stages - 1} |"
        )
    if "" in stages:
        raise ValueError(
            f"every stage holds a part of the model: stage {stages.index('')} of {len(stages)} is empty in {layout!r}; "
            f"leave out a |, or put a t there"
        )
    given, wanted = "".join(stages), letters_of(parts)
    if given != wanted:
        raise ValueError(
            f"a layout names every part of the model once, in order, here {shorten(wanted)} with "
            f"{count_layers(parts)} t: got {shorten(given)} with {given.count('t')} t; change {layout!r} accordingly"
        )
    check_enough(count_layers(parts), len(stages))
    return Cut(tuple(map(len, stages)))


def layout_of(parts: Sequence[Part], cut: Cut) -> str:
    """Write a cut as a layout: the reverse of `cut_by_layout`, short where stages repeat.

    Raises `ValueError` for the cut of another model.
    """
    check_parts(parts)
    check_whole(parts, cut)
    letters = letters_of(parts)
    stages = [letters[of_stage.start : of_stage.stop] for of_stage in map(cut.parts_of_stage, range(cut.num_stages))]
    runs = [(stage, len(list(run))) for stage, run in groupby(stages[:-1])]
    texts = [f"({shorten(stage)}|)*{num}" if num > 2 else f"{shorten(stage)}|" * num for stage, num in runs]
    return "".join([*texts, shorten(stages[-1])])


def letters_of(parts: Sequence[Part]) -> str:
    """A letter a part."""
    return "".join(LETTERS[part.kind] for part in parts)


def shorten(letters: str) -> str:
    """Write four and more of a letter as a repetition."""
    runs = [(letter, len(list(run))) for letter, run in groupby(letters)]
    return "".join(f"{letter}*{num}" if num > 3 else letter * num for letter, num in runs)


def expand(layout: str) -> str:
    """Write out all repetitions, so that only `E t m L |` are left. Raises `ValueError` that shows a mistake."""
    groups: list[list[str]] = [[]]  # what is read of each group that is open; in the first, of the layout
    column = 0
    while column < len(layout):
        if layout[column] in ", ":
            column += 1
            continue
        token = _TOKEN.match(layout, column)
        if token is None:
            raise _mistake(layout, column, "unknown here; use E t m L | ( ) *n and commas")
        match token.lastindex:
            case 1:
                groups[-1].append(token[1])
            case 2:
                groups.append([])
            case 3 if len(groups) == 1:
                raise _mistake(layout, column, "closes what was never opened; leave it out")
            case 3:
                group = "".join(groups.pop())
                groups[-1].append(group)
            case _:
                _repeat(groups[-1], token[4], layout, column)
        column = token.end()
    if len(groups) > 1:
        raise ValueError(f"a group in a layout ends with ): {len(groups) - 1} not closed in {layout!r}; add it")
    return "".join(groups[0])


def _repeat(pieces: list[str], times: str, layout: str, column: int) -> None:
    """Repeat the last piece."""
    if not pieces:
        raise _mistake(layout, column, "repeats nothing; put a letter or a group before it")
    if len(times) > len(str(LONGEST)) or not 1 <= int(times) * max(len(pieces[-1]), 1) <= LONGEST:
        raise _mistake(
            layout, column, f"repeats at least once, and makes at most {LONGEST} letters; use another number"
        )
    pieces[-1] *= int(times)


def _mistake(layout: str, column: int, what: str) -> ValueError:
    return ValueError(f"a layout such as Et|tt|tL is wrong in column {column + 1}: {layout[column:][:8]!r} {what}")
