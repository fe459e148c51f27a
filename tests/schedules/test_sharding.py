"""The sharding pass: a sharded stage is gathered before its first computation of a batch, and freed behind its last."""

import pytest

from stagewright.schedules import create, find, names, simulate, verify
from stagewright.schedules.data_parallel import insert_reductions
from stagewright.schedules.drawing import grid_text
from stagewright.schedules.instructions import Forward, Reshard, Step, Unshard
from stagewright.schedules.placement import linear
from stagewright.schedules.sharding import insert_sharding
from stagewright.schedules.variants import forward_only, without_steps

SYNCHRONOUS = [name for name in names() if find(name).synchronous]


def test_the_stream_of_1f1b() -> None:
    program = insert_reductions(create("1f1b", num_ranks=2, num_microbatches=2).program())
    first, second = insert_sharding(program, [1]).streams
    assert first == program.streams[0]
    assert [str(instruction) for instruction in second] == [
        "1RECV_F0",
        "1RECV_F1",
        "1UNSHARD",
        "1F0",
        "1B0",
        "1SEND_B0",
        "1F1",
        "1B1",
        "1SEND_B1",
        "1REDUCE_GRAD",
        "1RESHARD",
        "1STEP@1",
    ]


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_every_program_with_shards_is_proved_drawn_and_simulated(name: str) -> None:
    """The same computations at the same times; once a batch each stage is gathered and freed."""
    bare = insert_reductions(create(name, num_ranks=4, num_microbatches=8).program(2))
    program = insert_sharding(bare, range(bare.num_stages))
    verify(program)
    assert insert_sharding(program, range(bare.num_stages)) == program
    assert simulate(program).makespan == simulate(bare).makespan
    assert grid_text(simulate(program)) == grid_text(simulate(bare))
    for rank, stream in enumerate(program.streams):
        assert tuple(item for item in stream if not isinstance(item, Unshard | Reshard)) == bare.streams[rank]
        for stage in program.placement.stages_of(rank):
            own = [item for item in stream if item in (Unshard(stage), Reshard(stage)) or item == Step(stage, 1)]
            batch = [Unshard(stage), Reshard(stage)]
            assert own == [*batch, Step(stage, 1), *batch]


def test_stages_are_freed_where_nothing_is_updated() -> None:
    program = insert_reductions(create("gpipe", num_ranks=2, num_microbatches=2).program())
    stream = insert_sharding(without_steps(program), [0]).streams[0]
    assert str(stream[-1]) == "0RESHARD"
    evaluated = insert_sharding(forward_only(linear(2), 2), [0, 1])
    for stage, stream in enumerate(evaluated.streams):
        own = [item for item in stream if isinstance(item, Unshard | Reshard | Forward)]
        assert own == [Unshard(stage), Forward(stage, 0), Forward(stage, 1), Reshard(stage)]
