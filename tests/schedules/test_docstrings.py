"""A schedule's docstring is its grid: what it shows for four ranks is what simulation draws."""

import re
from inspect import cleandoc

import pytest

from stagewright.schedules import create, names, simulate
from stagewright.schedules.drawing import grid_text
from stagewright.schedules.registry import find


def grid_of(name: str) -> str:
    """The lines of a docstring that are a rank's."""
    lines = cleandoc(find(name).__doc__ or "").splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines if line.startswith("    rank "))


def drawn(name: str, total: int) -> str:
    """The grid of ``total`` numbered microbatches: one batch of them, or two where batches run into each other."""
    steps = 1 if find(name).synchronous else 2
    slices = create(name, num_ranks=4, num_microbatches=total).num_units // total
    schedule = create(name, num_ranks=4, num_microbatches=total // slices // steps)
    return grid_text(simulate(schedule.program(steps)))


@pytest.mark.parametrize("name", names())
def test_the_docstring_shows_the_schedule(name: str) -> None:
    grid = grid_of(name)
    assert len(grid.splitlines()) == 4, f"the docstring of {name} needs its grid for four ranks, one line each"
    total = max(map(int, re.findall(r"[Ff](\d+)", grid))) + 1
    assert grid == drawn(name, total)


@pytest.mark.parametrize("name", names())
def test_the_docstring_starts_with_a_sentence(name: str) -> None:
    """The name, the summary and the first paragraph are what ``show`` and an editor present of a schedule."""
    kind = find(name)
    paragraph = " ".join(cleandoc(kind.__doc__ or "").split("\n\n")[0].split())
    assert paragraph.endswith((".", ":"))
    assert not paragraph.startswith(f"{kind.__name__}(")  # what dataclass writes where there is no docstring
    assert kind.summary
    assert not kind.summary.endswith(".")
