import pytest

from stagewright.schedules import ScheduleError, create, simulate


def test_slices_go_back_in_reverse() -> None:
    schedule = create("seq1f1b", num_ranks=2, num_microbatches=2, num_slices=3)
    assert [" ".join(map(str, schedule.order(rank))) for rank in range(2)] == [
        "0F0 0F1 0F2 0F3 0B2 0F4 0B1 0F5 0B0 0B5 0B4 0B3",
        "1F0 1F1 1F2 1B2 1F3 1B1 1F4 1B0 1F5 1B5 1B4 1B3",
    ]


@pytest.mark.parametrize(("num_slices", "makespan", "peak"), [(1, 33, 4), (2, 28.5, 2.5)])
def test_published_makespan_and_peak(num_slices: int, makespan: float, peak: float) -> None:
    """In units of a whole microbatch's forward."""
    timeline = simulate(create("seq1f1b", num_ranks=4, num_microbatches=8, num_slices=num_slices).program())
    assert timeline.makespan / num_slices == makespan
    assert max(timeline.peak_stash) / num_slices == peak


def test_several_batches_number_their_slices_on() -> None:
    program = create("seq1f1b", num_ranks=1, num_microbatches=1, num_slices=2).program(steps=2)
    assert program.to_csv() == "0F0,0F1,0B1,0B0,0STEP@1,0F2,0F3,0B3,0B2,0STEP@2\n"


def test_it_is_not_for_the_engine() -> None:
    schedule = create("seq1f1b", num_ranks=2, num_microbatches=4)
    assert not schedule.runnable
    assert "attention state" in schedule.refusal
    assert create("1f1b", num_ranks=2, num_microbatches=4).runnable


def test_slices_are_counted() -> None:
    with pytest.raises(ScheduleError, match="num_slices is a whole number from 1 up: got 0"):
        create("seq1f1b", num_ranks=2, num_microbatches=4, num_slices=0)
