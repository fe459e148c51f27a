"""The same over gloo, a process a rank: what arrives is what was sent, and the result is that of the plain loop."""

from collections.abc import Sequence

import pytest
from plain import assert_same, train_many, train_plainly
from shapes import rows_of, schedules_of, synchronous_names

from stagewright.engine import launch_local
from stagewright.schedules import Schedule

STEPS = 3


def assert_train_as_plainly(schedules: Sequence[Schedule]) -> None:
    cases = [(rows_of(schedule), STEPS, {"schedule": schedule}) for schedule in schedules]
    results = launch_local(train_many, schedules[0].num_ranks, args=(cases,))
    for index, schedule in enumerate(schedules):
        assert_same(
            [of_rank[index] for of_rank in results], train_plainly(schedule.num_stages, rows_of(schedule), STEPS)
        )


def dealt() -> dict[int, list[Schedule]]:
    """Each schedule once, dealt to 2, 3 and 4 ranks in turn; 8 microbatches, two chunks where one can choose."""
    dealt: dict[int, list[Schedule]] = {2: [], 3: [], 4: []}
    for name in synchronous_names():
        num_ranks = min(dealt, key=lambda ranks: len(dealt[ranks]))
        schedules = list(schedules_of(name, (num_ranks,), (8,))) or list(schedules_of(name, (4,), (8,)))
        dealt[schedules[0].num_ranks].append(schedules[len(schedules) // 2])
    return dealt


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_schedule_equals_plain_loop(num_ranks: int) -> None:
    assert_train_as_plainly(dealt()[num_ranks])


def test_no_schedule_goes_untested() -> None:
    assert sorted(schedule.name for schedules in dealt().values() for schedule in schedules) == sorted(
        synchronous_names()
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", synchronous_names())
def test_every_schedule_equals_plain_loop_at_every_shape(name: str, num_ranks: int) -> None:
    schedules = list(schedules_of(name, (num_ranks,), range(1, 10)))
    if not schedules:
        pytest.skip(f"{name} does not serve {num_ranks} ranks")
    assert_train_as_plainly(schedules)
