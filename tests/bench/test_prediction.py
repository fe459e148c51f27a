"""The bench of predictions: what it measures and prints; no time is asserted."""

from functools import partial

import pytest

from stagewright.bench.prediction import (
    Case,
    Outcome,
    Plan,
    cells_of,
    interval,
    measure,
    schedules_of,
    sleep_stage,
    steps_of,
)
from stagewright.bench.stages import HalvedSleepStage
from stagewright.schedules import ScheduleError, create

CASE = Case("sleep", 2, 4, partial(sleep_stage, 0.0), rows=4, width=8)


def test_a_step_lasts_from_the_first_begin_to_the_last_end() -> None:
    assert steps_of([[(1.0, 3.0), (4.0, 9.0)], [(1.5, 2.5), (4.5, 10.0)]], synchronous=True) == (2.0, 6.0)


def test_where_steps_do_not_end_they_follow_each_other() -> None:
    """Ends on the average of the ranks: 2, 4 and 7."""
    ticks = [[(0.0, 1.0), (1.0, 3.0), (3.0, 6.0)], [(0.0, 3.0), (3.0, 5.0), (5.0, 8.0)]]
    assert steps_of(ticks, synchronous=False) == (2.0, 3.0)


def test_the_interval_is_that_of_the_median() -> None:
    values = [float(number) for number in range(1, 102)]
    low, high = interval(values)
    assert low < 51 < high
    assert low > 35
    assert high < 67
    assert interval([2.0, 2.0, 2.0]) == (2.0, 2.0)


def test_a_line_tells_the_error_and_whether_the_bar_is_missed() -> None:
    good = Outcome("sleep", "1f1b", (0.099, 0.1, 0.101), (0.104, 0.104, 0.104))
    assert [str(cell) for cell in cells_of(good)] == [
        "sleep", "1f1b", "100.0", "104.0 [104.0 .. 104.0]", "+4.0%"
    ]  # fmt: skip
    bad = Outcome("sleep", "1f1b", (0.1,), (0.094,))
    assert str(cells_of(bad)[-1]) == "-6.0% !"


def test_every_schedule_that_runs_in_the_shape_is_measured() -> None:
    names = [schedule.name for schedule in schedules_of(CASE, None)]
    assert {"1f1b", "zbv", "dualpipe", "2bw"} <= set(names)
    assert "seq1f1b" not in names
    with pytest.raises(ScheduleError, match="there is no schedule"):
        schedules_of(CASE, ["nothing"])


def test_a_halved_stage_sleeps_for_its_weight_gradient_under_split_backward_alone() -> None:
    stage = sleep_stage(0.03, 3, 0)
    assert isinstance(stage, HalvedSleepStage)
    assert stage.seconds == (0.01, 0.01)
    assert stage.operation.seconds == 0.01


@pytest.mark.slow
def test_synchronous_and_asynchronous_schedules_are_measured() -> None:
    schedules = [create(name, num_ranks=2, num_microbatches=4) for name in ("zb-h1", "2bw")]
    outcomes = measure(CASE, schedules, Plan(num_rounds=2, num_steps=2))
    assert [outcome.schedule for outcome in outcomes] == ["zb-h1", "2bw"]
    for outcome in outcomes:
        assert len(outcome.predicted) == 2
        assert len(outcome.measured) == 4
        assert min(outcome.measured) > 0
