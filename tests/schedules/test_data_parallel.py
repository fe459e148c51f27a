"""The data-parallel pass: every stage's gradient is summed over the replicas of the pipeline, as early as it can be."""

from itertools import pairwise

import pytest

from stagewright.schedules import Costs, create, find, names, simulate, verify
from stagewright.schedules.asynchronous import AsynchronousSchedule
from stagewright.schedules.data_parallel import insert_reductions
from stagewright.schedules.instructions import ReduceGradient, SendGradient, Step
from stagewright.schedules.updates import stages_finished
from stagewright.schedules.windows import Windows

SYNCHRONOUS = [name for name in names() if find(name).synchronous]


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("steps", [1, 2])
def test_each_stage_is_summed_right_behind_its_last_gradient_and_the_send_of_that(name: str, steps: int) -> None:
    bare = create(name, num_ranks=4, num_microbatches=8).program(steps)
    program = insert_reductions(bare)
    verify(program)
    for rank, stream in enumerate(program.streams):
        without = tuple(item for item in stream if not isinstance(item, ReduceGradient))
        assert without == tuple(item for item in bare.streams[rank] if not isinstance(item, ReduceGradient))
        for stage in program.placement.stages_of(rank):
            places = [index for index, item in enumerate(stream) if item == ReduceGradient(stage)]
            assert len(places) == steps
            if len(program.placement.replicas_of(stage)) > 1:
                continue  # the schedule has put it there itself
            for place in places:
                before = [item for item in stream[:place] if not isinstance(item, ReduceGradient | SendGradient)]
                assert stages_finished(before[-1]) == (stage,)
            for place, end in zip(places, (*places[1:], len(stream)), strict=True):
                late = [item for item in stream[place:end] if stage in stages_finished(item)]
                steps_between = [item for item in stream[place:end] if isinstance(item, Step) and item.stage == stage]
                assert len(steps_between) == 1
                assert not late or stream.index(steps_between[0]) < stream.index(late[0])


def test_what_is_summed_already_is_not_summed_twice() -> None:
    program = insert_reductions(create("dualpipe", num_ranks=4, num_microbatches=8).program())
    assert insert_reductions(program) == program == create("dualpipe", num_ranks=4, num_microbatches=8).program()


def test_the_streams_of_interleaved() -> None:
    schedule = create("interleaved", num_ranks=2, num_microbatches=2, num_chunks=2)
    streams = insert_reductions(schedule.program()).streams
    backwards = [
        [str(item) for item in stream if str(item)[1] not in "FR" or "REDUCE" in str(item)] for stream in streams
    ]
    assert [[token for token in tokens if "SEND_F" not in token] for tokens in backwards] == [
        ["2B0", "2SEND_B0", "2B1", "2SEND_B1", "2REDUCE_GRAD", "0B0", "0B1", "0REDUCE_GRAD", "0STEP@1", "2STEP@1"],
        [
            *("3B0", "3SEND_B0", "3B1", "3SEND_B1", "3REDUCE_GRAD"),
            *("1B0", "1SEND_B0", "1B1", "1SEND_B1", "1REDUCE_GRAD", "1STEP@1", "3STEP@1"),
        ],
    ]


def test_sums_hide_behind_the_cooldown_of_earlier_chunks() -> None:
    """Where a sum takes as long as what its rank still computes, the step is no longer for it but for the last ones."""
    program = insert_reductions(create("interleaved", num_ranks=2, num_microbatches=4, num_chunks=2).program())
    bare = simulate(program, Costs(forward=1, backward=2)).makespan
    assert simulate(program, Costs(forward=1, backward=2, reduce=(1, 1, 2, 2))).makespan == bare + 1


@pytest.mark.parametrize("name", [name for name in names() if not find(name).synchronous])
@pytest.mark.parametrize("scalars", [False, True])
def test_the_windows_of_an_asynchronous_schedule_sum_before_they_step(name: str, scalars: bool) -> None:
    schedule = create(name, num_ranks=2, num_microbatches=4)
    assert isinstance(schedule, AsynchronousSchedule)
    program = Windows(schedule, scalars=scalars and "2bw" in name, data_parallel=True).program((2, 5))
    verify(program)
    for rank, stream in enumerate(program.streams):
        for stage in schedule.placement.stages_of(rank):
            own = [item for item in stream if item == ReduceGradient(stage) or getattr(item, "stage", 0) == stage]
            updates = [item for item in own if isinstance(item, ReduceGradient | Step)]
            assert len(updates) == 2 * (5 if "2bw" in name else 20)
            for one, other in pairwise(updates):
                assert isinstance(one, Step) != isinstance(other, Step)
