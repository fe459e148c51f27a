"""The table of the literature's bubbles and peaks, one row a schedule, held against simulation over many shapes.

Bubbles are idle time per rank, in units where F, I, W and B are those of one stage for one microbatch (or one
slice of it); peaks are stash entries. P ranks, M microbatches, V chunks, N the group size, s slices, r the rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stagewright.schedules import Costs, create, simulate, verify


@dataclass(frozen=True)
class At:
    """A shape and its costs."""

    p: int
    m: int
    v: int
    n: int
    s: int
    f: float
    i: float
    w: float

    @property
    def b(self) -> float:
        return self.i + self.w


@dataclass(frozen=True)
class ClosedForm:
    name: str
    peak: Callable[[At, int], int]  # of a rank
    bubble: Callable[[At], float]
    holds: Callable[[At], bool] = lambda at: True  # where the bubble's formula is exact
    measure: str = "makespan"
    options: Mapping[str, Any] = field(default_factory=dict)


CLOSED_FORMS = [
    ClosedForm(
        "none",
        peak=lambda at, r: 1,
        bubble=lambda at: (at.p - 1) * at.m * (at.f + at.b),
    ),
    ClosedForm(
        "gpipe",
        peak=lambda at, r: at.m,
        bubble=lambda at: (at.p - 1) * (at.f + at.b),
    ),
    ClosedForm(
        "gpipe",
        peak=lambda at, r: at.m,
        bubble=lambda at: (at.p - 1) * (at.f + at.b),
        options={"last_first": True},
    ),
    ClosedForm(
        "1f1b",
        peak=lambda at, r: min(at.p - r, at.m),
        bubble=lambda at: (at.p - 1) * (at.f + at.b),
    ),
    ClosedForm(
        "1f1b",
        peak=lambda at, r: min(2 * (at.p - 1 - r) + 1, at.m),
        bubble=lambda at: (at.p - 1) * (at.f + at.b),
        options={"deep_warmup": True},
    ),
    ClosedForm(
        "interleaved",
        peak=lambda at, r: min(2 * (at.p - 1 - r) + (at.v - 1) * at.n + 1, at.m * at.v),
        bubble=lambda at: (at.p - 1 + max(at.p - at.m, 0) * (at.v - 1)) * (at.f + at.b),
    ),
    ClosedForm(
        "interleaved",
        peak=lambda at, r: min(2 * (at.p - 1 - r) + (at.v - 1) * at.n + 1, at.m * at.v),
        bubble=lambda at: (at.p - 1) * (at.f + at.b),
        options={"group_size": "any from P up"},
    ),
    ClosedForm(
        "bfs",
        peak=lambda at, r: at.m * at.v,
        bubble=lambda at: (at.p - 1 + max(at.p - at.m, 0) * (at.v - 1)) * (at.f + at.b),
    ),
    ClosedForm(
        "zb-h1",
        peak=lambda at, r: min(at.p, at.m),
        bubble=lambda at: (at.p - 1) * (at.f + at.i - at.w),
        holds=lambda at: at.m >= at.p and at.w <= at.f and at.w <= at.i,
    ),
    ClosedForm(
        "zb-h2",
        peak=lambda at, r: min(2 * at.p - 1, at.m),
        bubble=lambda at: (at.p - 1) * (at.f + at.i - 2 * at.w),
        holds=lambda at: at.m >= 2 * at.p - 1 and at.w <= at.f and 2 * at.w <= at.f + at.i,
        measure="span",
    ),
    ClosedForm(
        "interleaved-zb",
        peak=lambda at, r: min((at.v - 1) * at.n + at.p, at.m * at.v),
        bubble=lambda at: (at.p - 1) * (at.f + at.i - at.w),
        holds=lambda at: at.m >= at.p and at.w <= at.f and at.w <= at.i,
    ),
    ClosedForm(
        "interleaved-zb",
        peak=lambda at, r: min((at.v - 1) * at.n + at.p, at.m * at.v),
        bubble=lambda at: (at.p - 1) * (at.f + at.i - at.w),
        holds=lambda at: at.w <= at.f and at.w <= at.i,
        options={"group_size": "any from P up"},
    ),
    ClosedForm(
        "gis",
        peak=lambda at, r: min(at.n * (at.v - 1) + at.p - r, at.m * at.v),
        bubble=lambda at: (at.p - 1) * (at.f + at.i),
        holds=lambda at: min(at.n, at.m % at.n or at.n) >= at.p,
    ),
    ClosedForm(
        "gis",
        peak=lambda at, r: min(at.n * (at.v - 1) + at.p - r, at.m * at.v),
        bubble=lambda at: (at.p - 1) * (at.f + at.i) + max(at.p - at.n, 0) * (at.v - 1) * at.f,
        holds=lambda at: at.f == at.i == at.w and at.n >= (at.p + 1) // 2,
        options={"group_size": "any from P/2 up"},
    ),
    ClosedForm(
        "seq1f1b",
        peak=lambda at, r: min(at.p - r - 1 + at.s, at.m * at.s),
        bubble=lambda at: (at.p - 1) * (at.f + at.b),
    ),
]

QUARTERS = st.integers(1, 12).map(lambda quarters: quarters / 4)  # exact in floating point, so that == is fair
COSTS = st.one_of(st.just((1.0, 1.0, 1.0)), st.tuples(QUARTERS, QUARTERS, QUARTERS))


def label(form: ClosedForm) -> str:
    return form.name + "".join(f" {option}={value}" for option, value in form.options.items())


@pytest.mark.parametrize("form", CLOSED_FORMS, ids=label)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(data=st.data())
def test_bubble_and_peak(form: ClosedForm, data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 8), "num_ranks")
    num_microbatches = data.draw(st.integers(1, 20), "num_microbatches")
    forward, inputs, weights = data.draw(COSTS, "F, I, W")
    options = dict(form.options)
    if form.name in ("interleaved", "bfs", "interleaved-zb", "gis"):
        options["num_chunks"] = data.draw(st.integers(1, 4), "num_chunks")
    if form.name == "seq1f1b":
        options["num_slices"] = data.draw(st.integers(1, 4), "num_slices")
    if "group_size" in options:
        fewest = num_ranks if options["group_size"] == "any from P up" else (num_ranks + 1) // 2
        sizes = range(fewest, num_microbatches + 1)
        legal = [size for size in sizes if num_microbatches % size == 0 or num_microbatches % size >= fewest]
        assume(legal)
        options["group_size"] = data.draw(st.sampled_from(legal), "group_size")

    schedule = create(form.name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    program = schedule.program()
    verify(program, semantics="buffered")
    costs = Costs(forward=forward, input_gradient=inputs, weight_gradient=weights)
    timeline = simulate(program, costs)
    at = At(
        num_ranks,
        num_microbatches,
        options.get("num_chunks", 1),
        getattr(schedule, "group", 0),
        options.get("num_slices", 1),
        forward,
        inputs,
        weights,
    )

    assert timeline.peak_stash == tuple(form.peak(at, rank) for rank in range(num_ranks))
    formula = schedule.bubble_formula(costs)
    if form.holds(at):
        assert getattr(timeline, form.measure) - timeline.ideal == form.bubble(at)
        assert formula is not None
    if formula is not None:
        assert formula.measure == form.measure
        assert getattr(timeline, formula.measure) == formula.ideal + formula.idle


@pytest.mark.parametrize("form", CLOSED_FORMS, ids=label)
def test_every_small_shape_is_served(form: ClosedForm) -> None:
    """One microbatch, fewer than ranks, not divisible by the ranks: ``program`` proves each of them."""
    chunks = [{"num_chunks": count} for count in (1, 2, 3)] if create_has_chunks(form.name) else [{}]
    options = {option: value for option, value in form.options.items() if option != "group_size"}
    for num_ranks in range(1, 6):
        for num_microbatches in range(1, 8):
            for given_chunks in chunks:
                shape = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
                create(form.name, **shape, **given_chunks, **options).program()


def create_has_chunks(name: str) -> bool:
    return hasattr(create(name, num_ranks=1, num_microbatches=1), "num_chunks")
