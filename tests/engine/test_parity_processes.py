"""The same over gloo, a process a rank: what crosses is what was sent, and the result that of the plain loop."""

from functools import cache

import pytest
from plain import Result, assert_same, train_many, train_plainly
from shapes import rows_of, schedules_of, synchronous_names

from stagewright.engine import launch_local

STEPS = 3


@cache
def plain(num_stages: int, rows: int) -> Result:
    return train_plainly(num_stages, rows, STEPS)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_schedule_equals_plain_loop(num_ranks: int) -> None:
    schedules = [
        schedule
        for name in synchronous_names()
        for schedule in list(schedules_of(name, (num_ranks,), (3, 8)))[-2:]  # the most chunks
    ]
    assert len(schedules) > len(synchronous_names())
    results = launch_local(
        train_many, num_ranks, args=([(rows_of(schedule), STEPS, {"schedule": schedule}) for schedule in schedules],)
    )
    for index, schedule in enumerate(schedules):
        assert_same([of_rank[index] for of_rank in results], plain(schedule.num_stages, rows_of(schedule)))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", synchronous_names())
def test_every_schedule_equals_plain_loop_at_every_shape(name: str, num_ranks: int) -> None:
    schedules = list(schedules_of(name, (num_ranks,), range(1, 10)))
    results = launch_local(
        train_many, num_ranks, args=([(rows_of(schedule), STEPS, {"schedule": schedule}) for schedule in schedules],)
    )
    for index, schedule in enumerate(schedules):
        assert_same([of_rank[index] for of_rank in results], plain(schedule.num_stages, rows_of(schedule)))
