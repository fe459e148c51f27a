"""Whatever moves data between ranks or changes weights is in the program that runs: drawn, proved, simulated."""

from collections import Counter
from typing import Any

import pytest
import torch
from counting import CountingTransport, on_counting_threads
from meanings import ALL, under
from plain import make_batch, make_stage, momentum, squared_error
from tied import TIED, Build, make_text, mean_over_tokens, sum_and_count

from stagewright.engine import Pipeline, RankContext
from stagewright.schedules import Program, Schedule, create, simulate, verify
from stagewright.schedules.drawing.text import grid_text
from stagewright.schedules.instructions import Step

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"loss_fn": mean_over_tokens},
    "counts": {"loss_fn": sum_and_count},
    "tied": {"loss_fn": mean_over_tokens, "tied": TIED},
    "clips": {"loss_fn": mean_over_tokens, "max_norm": 1.0},
    "scales": {"loss_fn": mean_over_tokens, "loss_scale": "dynamic"},
    "all": {"loss_fn": sum_and_count, "tied": TIED, "max_norm": 1.0, "loss_scale": 8.0},
}


def run_three(context: RankContext, schedule: Schedule, options: dict[str, Any]) -> Any:
    """The programs announced before, and those that then ran; and all messages of the second step."""
    torch.set_num_threads(1)
    transport = context.transport
    assert isinstance(transport, CountingTransport)
    with Pipeline(
        Build(schedule.num_stages), schedule=schedule, optimizer=momentum, transport=transport, **options
    ) as pipe:
        announced, ran = [], []
        for step in range(2):
            announced.append(pipe.program)
            transport.sent.clear()
            pipe.train_step(*make_text(9, step))
            sent = [kind for kind, _ in transport.sent]
            ran.append(pipe.trace().program)
        pipe.forward_backward(*make_text(9, 3))
        return announced, ran, pipe.trace().program, sent


def tokens(program: Program, rank: int) -> Counter[str]:
    """How often each kind of instruction stands in a rank's stream."""
    return Counter(type(instruction).__name__ for instruction in program.streams[rank])


@under(ALL)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_is_announced_runs_and_nothing_else_is_sent(schedule: Schedule, options: dict[str, Any]) -> None:
    """A loss that is no (sum, count) is known for one after the first step: nobody need agree on anything then."""
    results = on_counting_threads(run_three, schedule.num_ranks, schedule, options)
    needs_scalars = [True, options not in (OPTIONS["plain"], OPTIONS["tied"])]
    last = schedule.num_stages - 1
    for rank, (announced, ran, without_step, sent) in enumerate(results):
        assert ran == announced == results[0][0]
        for stream, alone in zip(ran[1].streams, without_step.streams):
            assert alone == tuple(instruction for instruction in stream if not isinstance(instruction, Step))
        stages = schedule.placement.stages_of(rank)
        for program, wanted in zip(ran, needs_scalars):
            assert tokens(program, rank)["SyncScalars"] == wanted
            assert tokens(program, rank)["ReduceTied"] == (
                ((0 in stages) + (last in stages)) if "tied" in options else 0
            )
        assert_all_sent_by(ran[1], rank, Counter(sent))


def assert_all_sent_by(program: Program, rank: int, sent: Counter[str]) -> None:
    """Each message of a step belongs to an instruction."""
    counts = tokens(program, rank)
    assert sent.pop("activation", 0) == counts["SendActivation"]
    assert sent.pop("gradient", 0) == counts["SendGradient"]
    assert sent.pop("scalars", 0) == (program.num_ranks - 1) * counts["SyncScalars"]
    copies = len(program.placement.routes) - 1
    assert sent.pop("replica", 0) == copies * counts["ReduceGradient"]
    assert sent.pop("tied", 0) <= counts["ReduceTied"]
    assert set(sent) <= ({"gather"} if copies else set())  # both ends bring their halves of the loss together


def announce(context: RankContext, schedule: Schedule) -> Program | None:
    """One rank alone may ask; nobody waits for anybody."""
    with Pipeline(
        Build(schedule.num_stages), schedule=schedule, transport=context.transport, tied=TIED, max_norm=1.0
    ) as pipe:
        return pipe.program if context.rank == 0 else None


@under(ALL)
def test_the_program_that_runs_is_proved_simulated_and_drawn(schedule: Schedule) -> None:
    program, *_ = on_counting_threads(announce, schedule.num_ranks, schedule)
    for semantics in ("rendezvous", "buffered"):
        verify(program, semantics=semantics)
    timeline = simulate(program)
    assert timeline.makespan == simulate(schedule.program()).makespan
    assert len(grid_text(timeline).splitlines()) == schedule.num_ranks
    assert "0REDUCE_TIED" in program.to_csv()
    again = Program.from_csv(program.to_csv(), placement=schedule.placement)
    assert again.streams == program.streams


def run_without(context: RankContext, schedule: Schedule) -> Program:
    with Pipeline(
        make_stage, schedule=schedule, loss_fn=squared_error, optimizer=momentum, transport=context.transport
    ) as pipe:
        pipe.train_step(*make_batch(9, 0))
        return pipe.program


@under(ALL)
def test_a_step_that_needs_nothing_runs_the_schedules_own_program(schedule: Schedule) -> None:
    assert on_counting_threads(run_without, schedule.num_ranks, schedule) == [schedule.program()] * schedule.num_ranks


def test_this_is_what_it_looks_like() -> None:
    """Tied ends and a norm on two ranks."""
    schedule = create("1f1b", num_ranks=2, num_microbatches=2)
    program, _ = on_counting_threads(announce, 2, schedule)
    assert program.to_csv().splitlines() == [
        "0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,0B1,0REDUCE_TIED,SYNC_SCALARS,0STEP@1",
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1REDUCE_TIED,1SEND_B1,SYNC_SCALARS,1STEP@1",
    ]
