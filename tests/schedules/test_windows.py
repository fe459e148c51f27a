"""Windows: what a rank runs for one batch, cut out of a schedule that never ends; put together, a legal program."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import assert_refused

from stagewright.schedules import Costs, Program, ScheduleError, create, simulate, verify
from stagewright.schedules.asynchronous import AsynchronousSchedule
from stagewright.schedules.communication import insert_communication
from stagewright.schedules.instructions import (
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from stagewright.schedules.proof import SEMANTICS
from stagewright.schedules.windows import Piece, Windows, later

EVERY = ["2bw", "2bw-interleaved", "pipedream", "pipedream with vertical sync"]
# What an update may need of other ranks.
NEEDS = [(), ("scalars",), ("tied",), ("scalars", "tied")]


@cache
def windows_of(name: str, num_ranks: int, num_microbatches: int, needs: Sequence[str] = ()) -> Windows:
    options = {"pipedream with vertical sync": {"vertical_sync": True}, "2bw-interleaved": {"num_chunks": 2}}
    schedule = create(
        name.split(" ")[0], num_ranks=num_ranks, num_microbatches=num_microbatches, **options.get(name, {})
    )
    assert isinstance(schedule, AsynchronousSchedule)
    tied = frozenset((0, schedule.num_stages - 1)) if "tied" in needs else frozenset[int]()
    return Windows(schedule, tied, "scalars" in needs)


def shapes(name: str, max_ranks: int = 5) -> Iterator[tuple[int, int]]:
    """(P, M), from as few microbatches as the schedule serves to some more than ranks."""
    for num_ranks in range(1, max_ranks + 1):
        for num_microbatches in range(1, num_ranks + 4):
            if num_microbatches >= num_ranks - 1 or name.startswith("pipedream"):
                yield num_ranks, num_microbatches


def tokens(piece: Piece, rank: int) -> str:
    return " ".join(str(later(instruction, piece.microbatches, piece.versions)) for instruction in piece.streams[rank])


def assert_legal(program: Program) -> None:
    for semantics in SEMANTICS:
        verify(program, semantics)


def test_windows_of_two_ranks() -> None:
    windows = windows_of("2bw", 2, 2)
    assert [tokens(windows.window(batch, 0), 0) for batch in range(3)] == [
        "0F0@0 0SEND_F0 0RECV_B0 0F1@0 0SEND_F1 0RECV_B1 0B0@0",
        "0F2@0 0SEND_F2 0RECV_B2 0B1@0 0STEP@1 0F3@0 0SEND_F3 0RECV_B3 0B2@0",
        "0F4@1 0SEND_F4 0RECV_B4 0B3@0 0STEP@2 0F5@1 0SEND_F5 0RECV_B5 0B4@1",
    ]
    assert [tokens(windows.window(batch, 0), 1) for batch in range(2)] == [
        "1RECV_F0 1RECV_F1 1F0@0 1B0@0 1SEND_B0 1F1@0 1B1@0 1SEND_B1 1STEP@1",
        "1RECV_F2 1F2@0 1RECV_F3 1B2@0 1SEND_B2 1F3@0 1B3@0 1SEND_B3 1STEP@2",
    ]
    assert [tokens(windows.drain(2, 0), rank) for rank in range(2)] == ["0B3@0 0STEP@2", ""]


def test_a_step_that_needs_other_ranks_is_put_off() -> None:
    """To before the first forward that reads the version, or before the next scalars; without anything in between the
    update of batch t would wait for the first rank's last backward of it."""
    windows = windows_of("2bw", 2, 2, ("scalars", "tied"))
    assert [tokens(windows.window(batch, 0), 0) for batch in (1, 2)] == [
        "0F2@0 0SEND_F2 0RECV_B2 0B1@0 0REDUCE_TIED SYNC_SCALARS 0F3@0 0SEND_F3 0RECV_B3 0B2@0",
        "0STEP@1 0F4@1 0SEND_F4 0RECV_B4 0B3@0 0REDUCE_TIED SYNC_SCALARS 0F5@1 0SEND_F5 0RECV_B5 0B4@1",
    ]
    assert [tokens(windows.window(batch, 0), 1) for batch in (0, 1)] == [
        "1RECV_F0 1RECV_F1 1F0@0 1B0@0 1SEND_B0 1F1@0 1B1@0 1SEND_B1 1REDUCE_TIED SYNC_SCALARS",
        "1RECV_F2 1F2@0 1RECV_F3 1B2@0 1SEND_B2 1F3@0 1B3@0 1SEND_B3 1STEP@1 1REDUCE_TIED SYNC_SCALARS",
    ]
    assert [tokens(windows.drain(2, 0), rank) for rank in range(2)] == [
        "0B3@0 0STEP@1 0REDUCE_TIED SYNC_SCALARS 0STEP@2",
        "1STEP@2",
    ]


def test_only_ranks_that_need_others_put_off() -> None:
    """The middle rank shares no weight, so its update comes right after its last gradient."""
    windows = windows_of("2bw", 3, 3, ("tied",))
    assert "1B2@0 1SEND_B2 1STEP@1" in tokens(windows.window(1, 0), 1)
    assert "0B2@0 0REDUCE_TIED 0F5@0" in tokens(windows.window(1, 0), 0)


@pytest.mark.parametrize("name", EVERY)
def test_every_run_is_legal(name: str) -> None:
    """With drains anywhere, under buffered, rendezvous and in-order sends."""
    for shape in shapes(name):
        windows = windows_of(name, *shape)
        for drains in ((1,), (2,), (9,), (1, 2, 3), (2, 7), (3, 9)):
            assert_legal(windows.program(drains))


@pytest.mark.parametrize("needs", NEEDS, ids="+".join)
@pytest.mark.parametrize("name", EVERY)
def test_a_program_is_what_the_engine_runs_window_by_window(name: str, needs: Sequence[str]) -> None:
    """Of a few batches, for which no more windows are made than they have, and the next."""
    for shape in shapes(name, max_ranks=4):
        windows = windows_of(name, *shape, needs)
        for drains in ((1,), (2, 3), (3, 8)):
            pieces: list[Piece] = []
            for num_drained, num_batches in pairwise((0, *drains)):
                pieces += [windows.window(batch, num_drained) for batch in range(num_drained, num_batches)]
                pieces.append(windows.drain(num_batches, num_drained))
            program = replace(windows).program(drains)
            for rank, stream in enumerate(program.streams):
                assert " ".join(map(str, stream)) == " ".join(filter(None, (tokens(piece, rank) for piece in pieces)))


@pytest.mark.parametrize("needs", NEEDS[1:], ids="+".join)
@pytest.mark.parametrize("name", ["2bw", "2bw-interleaved"])
def test_every_run_that_needs_other_ranks_is_legal(name: str, needs: Sequence[str]) -> None:
    for shape in shapes(name, max_ranks=4):
        windows = windows_of(name, *shape, needs)
        for drains in ((1,), (2,), (9,), (1, 2, 3), (3, 8)):
            assert_legal(windows.program(drains))


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=25, deadline=None)
@given(shape=st.data(), pauses=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_any_sequence_of_drains_is_legal(name: str, shape: st.DataObject, pauses: list[int]) -> None:
    """Each batch is computed and applied once, on versions that exist: ``verify`` counts them."""
    num_ranks = shape.draw(st.integers(1, 7))
    needs = shape.draw(st.sampled_from(NEEDS)) if name.startswith("2bw") else ()
    fewest = 1 if name.startswith("pipedream") else max(num_ranks - 1, 1)
    windows = windows_of(name, num_ranks, shape.draw(st.integers(fewest, fewest + 6)), needs)
    program = windows.program([sum(pauses[: count + 1]) for count in range(len(pauses))])
    assert program.num_batches == sum(pauses)
    assert_legal(program)


def uncut(schedule: AsynchronousSchedule, num_batches: int) -> Program:
    """The same work in one piece, each receive as early as it may be."""
    return insert_communication(
        Program(
            schedule.streams(num_batches),
            schedule.placement,
            schedule.num_microbatches,
            num_batches,
            schedule.update_rule,
        )
    )


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("costs", [Costs(), Costs(forward=1.25, backward=2, send=0.25)], ids=["even", "uneven"])
def test_windows_are_never_slower_than_the_uncut_schedule(name: str, costs: Costs) -> None:
    for shape in shapes(name):
        windows = windows_of(name, *shape)
        for num_batches in (1, 2, 8):
            whole = simulate(uncut(windows.schedule, num_batches), costs)
            assert simulate(windows.program((num_batches,)), costs).makespan <= whole.makespan + 1e-9


def period(windows: Windows, costs: Costs) -> float:
    """Time of a batch, once the pipeline is full."""
    longer, shorter = (simulate(windows.program((count,)), costs).makespan for count in (16, 8))
    return (longer - shorter) / 8


@pytest.mark.parametrize("reduction", [0.0, 0.5])
def test_waiting_for_other_ranks_adds_no_bubble(reduction: float) -> None:
    """But for the reduction's latency, at most, where M = P-1."""
    costs = Costs(forward=1, backward=2, reduce=reduction)
    for num_ranks in (2, 3, 4, 8):
        for num_microbatches in (num_ranks - 1, num_ranks, 2 * num_ranks):
            slack = reduction if num_microbatches < num_ranks else 0
            for needs in NEEDS:
                found = period(windows_of("2bw", num_ranks, num_microbatches, needs), costs)
                assert 3 * num_microbatches <= found <= 3 * num_microbatches + slack


@pytest.mark.parametrize("name", EVERY)
def test_what_is_sent_in_a_window_is_received_in_it(name: str) -> None:
    """No receive waits for a batch that may never come, and no message for a receive that may come late."""
    for shape in shapes(name):
        windows = windows_of(name, *shape)
        pieces = [*(windows.window(batch, 2) for batch in range(2, 8)), windows.drain(8, 2)]
        for piece in pieces:
            sent = {receive_of(instruction) for stream in piece.streams for instruction in stream} - {None}
            received = {
                instruction
                for stream in piece.streams
                for instruction in stream
                if isinstance(instruction, ReceiveActivation | ReceiveGradient)
            }
            assert sent == received


def receive_of(instruction: Instruction) -> Instruction | None:
    match instruction:
        case SendActivation(stage, microbatch):
            return ReceiveActivation(stage + 1, microbatch)
        case SendGradient(stage, microbatch):
            return ReceiveGradient(stage - 1, microbatch)
        case _:
            return None


@pytest.mark.parametrize("name", EVERY)
def test_later_windows_are_one_window_with_other_numbers(name: str) -> None:
    """So a run of any length needs few of them."""
    for shape in shapes(name):
        windows = windows_of(name, *shape)
        far = windows.window(1000, 0)
        assert far == windows.window(1000, 0)
        assert far.name == windows.window(1001, 0).name
        assert far.name != windows.window(1001, 1000).name
        shift = windows.schedule.num_microbatches
        assert windows.window(1001, 0).microbatches == far.microbatches + shift
        assert windows.window(1001, 0).versions == far.versions + shift // windows.schedule.microbatches_per_update
        for rank in range(windows.schedule.num_ranks):
            computed = [item for item in far.streams[rank] if not is_communication(item)]
            wanted = list(windows.schedule.window(rank, 1000))
            assert [later(item, far.microbatches, far.versions) for item in computed] == wanted


def is_communication(instruction: Instruction) -> bool:
    return isinstance(instruction, SendActivation | SendGradient | ReceiveActivation | ReceiveGradient)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_program_of_a_schedule_is_that_of_its_windows(name: str, steps: int) -> None:
    """What ``show`` draws is what the engine runs, receive by receive."""
    windows = windows_of(name, 3, 4)
    assert windows.schedule.program(steps) == windows.program((steps,))


def test_a_second_gradient_buffer_is_shown_and_needed() -> None:
    for needs in NEEDS:
        windows = windows_of("2bw", 3, 3, needs)
        program = windows.program((4,))
        assert program.updates.num_gradient_buffers == (2 if needs else 1)
        if needs:
            one = replace(program, update_rule=replace(program.updates, num_gradient_buffers=1))
            assert_refused(one, "gradient buffer")


def test_a_program_has_at_least_one_batch() -> None:
    with pytest.raises(ScheduleError, match="steps is a whole number from 1 up: got 0"):
        windows_of("2bw", 2, 2).schedule.program(0)
