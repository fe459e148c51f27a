"""Every schedule trains as a plain loop in one process does: losses, gradients, weights and outputs, to 1e-12."""

from collections.abc import Iterator
from functools import cache
from itertools import product
from math import gcd

import pytest
from plain import Result, assert_same, train_pipelined, train_plainly
from shapes import label, rows_of, schedules_of, synchronous_names

from stagewright.engine import launch_local
from stagewright.schedules import Schedule, create

STEPS = 3


@cache
def plain(num_stages: int, rows: int) -> Result:
    return train_plainly(num_stages, rows, STEPS)


def assert_trains_as_plainly(schedule: Schedule) -> None:
    rows = rows_of(schedule)
    results = launch_local(
        train_pipelined, schedule.num_ranks, backend="threads", args=(rows, STEPS, {"schedule": schedule})
    )
    assert_same(results, plain(schedule.num_stages, rows))


def spread(name: str) -> Iterator[Schedule]:
    """A few shapes of each schedule: every number of ranks and chunks, few microbatches and many, even and odd."""
    shapes = list(schedules_of(name, (1, 2, 3, 4), range(1, 10)))
    stride = max(1, len(shapes) // 11)
    while gcd(stride, 6) > 1:  # else the same number of chunks, or only odd microbatches, would come up again and again
        stride += 1
    yield from shapes[::stride]


@pytest.mark.parametrize("schedule", [case for name in synchronous_names() for case in spread(name)], ids=label)
def test_equals_plain_loop(schedule: Schedule) -> None:
    assert_trains_as_plainly(schedule)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_ranks"), list(product(synchronous_names(), (1, 2, 3, 4))))
def test_equals_plain_loop_at_every_shape(name: str, num_ranks: int) -> None:
    for schedule in schedules_of(name, (num_ranks,), range(1, 10)):
        assert_trains_as_plainly(schedule)


@pytest.mark.parametrize("name", synchronous_names())
def test_no_schedule_goes_untested(name: str) -> None:
    """The cases above skip what a schedule refuses; it must not be that it refuses nearly all."""
    cases = list(spread(name))
    assert len({case.num_ranks for case in cases}) >= 2
    assert len({case.num_microbatches for case in cases}) >= 2


@pytest.mark.parametrize(
    "schedule",
    [
        create("gpipe", num_ranks=3, num_microbatches=5, last_first=True),
        create("1f1b", num_ranks=4, num_microbatches=7, deep_warmup=True),
        create("interleaved", num_ranks=2, num_microbatches=9, num_chunks=3, group_size=3),
        create("interleaved-zb", num_ranks=2, num_microbatches=9, num_chunks=2, group_size=3),
        create("gis", num_ranks=4, num_microbatches=8, num_chunks=2, group_size=2),
        create("chimera", num_ranks=4, num_microbatches=8, num_pairs=2),
    ],
    ids=label,
)
def test_options_change_the_order_and_nothing_else(schedule: Schedule) -> None:
    assert_trains_as_plainly(schedule)


@pytest.mark.parametrize(("rows", "num_microbatches"), [(9, 9), (10, 4), (7, 3), (1, 1), (5, 2)])
def test_rows_that_do_not_divide_count_as_rows(rows: int, num_microbatches: int) -> None:
    """The batch's mean is over rows, not over microbatches."""
    schedule = create("zb-h1", num_ranks=3, num_microbatches=num_microbatches)
    results = launch_local(train_pipelined, 3, backend="threads", args=(rows, STEPS, {"schedule": schedule}))
    assert_same(results, plain(schedule.num_stages, rows))
