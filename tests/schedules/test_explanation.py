"""Explanations: timelines whose split one can work out by hand, and sums that hold for all."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.schedules import Costs, Program, ScheduleError, Timeline, create, simulate
from stagewright.schedules.explanation import Split, explain
from stagewright.schedules.placement import linear

# One microbatch, two ranks.
TWO_RANKS = Program.from_csv(
    "0F0,0SEND_F0,0RECV_B0,0B0,0STEP@1\n1RECV_F0,1F0,1B0,1SEND_B0,1STEP@1",
    placement=linear(2),
)


def timeline(program: Program, *of_ranks: Sequence[tuple[float, float]]) -> Timeline:
    """Start and end of each instruction, rank by rank."""
    times = [time for of_rank in of_ranks for time in of_rank]
    return Timeline(program, Costs(), tuple(start for start, _ in times), tuple(end for _, end in times))


def parts(split: Split) -> tuple[float, ...]:
    return (split.computing, split.inherent, split.imbalance, split.communication, split.overhead)


def test_all_that_an_even_step_without_messages_has_is_the_bubble_of_its_schedule() -> None:
    measured = timeline(
        TWO_RANKS,
        [(0, 1), (1, 1), (1, 1), (4, 6), (6, 6)],
        [(0, 0), (1, 2), (2, 4), (4, 4), (4, 4)],
    )
    for split in explain(measured).splits:
        assert parts(split) == (3, 3, 0, 0, 0)


def test_a_slower_stage_is_imbalance() -> None:
    """F takes 1 and 3, B 2 and 6: means 2 and 4. With these each rank idles 6; here rank 0 idles 9, rank 1 3."""
    measured = timeline(
        TWO_RANKS,
        [(0, 1), (1, 1), (1, 1), (10, 12), (12, 12)],
        [(0, 0), (1, 4), (4, 10), (10, 10), (10, 10)],
    )
    first, second = explain(measured).splits
    assert parts(first) == (3, 6, 3, 0, 0)
    assert parts(second) == (9, 6, -3, 0, 0)


def test_messages_are_communication() -> None:
    """Each rank is busy for 0.5 with a SEND; the message is there 0.25 later."""
    measured = timeline(
        TWO_RANKS,
        [(0, 1), (1, 1.5), (1.5, 1.5), (5.5, 7.5), (7.5, 7.5)],
        [(0, 0), (1.75, 2.75), (2.75, 4.75), (4.75, 5.25), (5.25, 5.25)],
    )
    for split in explain(measured).splits:
        assert parts(split) == (3, 3, 0, 1.5, 0)


def test_what_nothing_accounts_for_is_overhead() -> None:
    """Rank 1 stands still for 0.5 between its forward and its backward."""
    measured = timeline(
        TWO_RANKS,
        [(0, 1), (1, 1), (1, 1), (4.5, 6.5), (6.5, 6.5)],
        [(0, 0), (1, 2), (2.5, 4.5), (4.5, 4.5), (4.5, 4.5)],
    )
    for split in explain(measured).splits:
        assert parts(split) == (3, 3, 0, 0, 0.5)


def test_a_message_later_than_others_of_its_hop_is_overhead() -> None:
    """Two microbatches go down; the first is there after 0.25, as is the last gradient; the second comes after 1."""
    program = Program.from_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1",
        placement=linear(2),
    )
    measured = timeline(
        program,
        [(0, 2), (2, 2), (2, 8), (8, 8), (8, 8), (8, 9), (9, 9), (11.25, 12.25)],
        [(0, 0), (2.25, 3.25), (3.25, 4.25), (4.25, 4.25), (4.25, 4.25), (9, 10), (10, 11), (11, 11)],
    )
    explanation = explain(measured)
    for split in explanation.splits:
        assert split.communication == 0.5
        assert split.overhead == 0.75
    assert str(explanation.contributions[0].event.instruction) == "0F1"
    late = {str(one.event.instruction): one.late for one in explanation.contributions}
    assert late["1F1"] == 1


def test_the_dearest_instruction_is_the_one_that_took_longest_beyond_its_kind() -> None:
    measured = timeline(
        TWO_RANKS,
        [(0, 1), (1, 1), (1, 1), (10, 12), (12, 12)],
        [(0, 0), (1, 4), (4, 10), (10, 10), (10, 10)],
    )
    found = [(str(one.event.instruction), one.longer, one.late) for one in explain(measured).contributions]
    assert found[0] == ("1B0", 2, 0)
    assert sorted(found) == [
        ("0B0", -2, 0), ("0F0", -1, 0), ("0SEND_F0", 0, 0), ("0STEP@1", 0, 0),
        ("1B0", 2, 0), ("1F0", 1, 0), ("1SEND_B0", 0, 0),
    ]  # fmt: skip


def test_without_a_flush_each_rank_has_its_own_step() -> None:
    """Windows that follow each other: rank 1 begins when the first activation comes, and ends later."""
    program = Program.from_csv(
        "0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1",
        placement=linear(2),
        num_microbatches=1,
    )
    measured = simulate(program, Costs(forward=1, backward=1))
    first, second = explain(measured).splits
    assert (first.step, *parts(first)) == (6, 4, 2, 0, 0, 0)
    assert (second.step, *parts(second)) == (4, 4, 0, 0, 0, 0)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe", "interleaved", "chimera", "zb-h2", "hanayo"])
@settings(max_examples=15)
@given(data=st.data())
def test_the_parts_add_up_to_the_step_of_every_rank(name: str, data: st.DataObject) -> None:
    program = create(name, num_ranks=4, num_microbatches=8).program()
    measured = data.draw(disturbed(program))
    explanation = explain(measured)
    for split in explanation.splits:
        assert split.step == pytest.approx(measured.makespan, rel=1e-12)
        assert sum(parts(split)) == pytest.approx(split.step, rel=1e-12, abs=1e-12)
        assert split.bubble == pytest.approx(split.step - split.computing, rel=1e-12, abs=1e-12)
        assert split.computing == pytest.approx(measured.busy[split.rank])
        assert split.communication >= -1e-9


@settings(max_examples=30)
@given(data=st.data())
def test_the_chain_accounts_for_the_whole_step(data: st.DataObject) -> None:
    """What its instructions take, with what they were late, is the time from its begin to its end."""
    measured = data.draw(disturbed(create("1f1b", num_ranks=3, num_microbatches=4).program()))
    chain = sorted(explain(measured).contributions, key=lambda one: one.event.start)
    events = [one.event for one in chain]
    means: dict[type, list[float]] = {}
    for events_of_rank in measured.events:
        for event in events_of_rank:
            means.setdefault(type(event.instruction), []).append(event.end - event.start)
    usual = sum(
        sum(means[type(event.instruction)]) / len(means[type(event.instruction)])
        for event in events
        if type(event.instruction).__name__ in ("Forward", "Backward", "Step")
    )
    total = max(event.end for event in events) - min(event.start for event in events)
    assert sum(one.cost for one in chain) + usual == pytest.approx(total, abs=1e-9)


@st.composite
def disturbed(draw: st.DrawFn, program: Program) -> Timeline:
    """A measured timeline: what was simulated with costs of its own for each stage, with delays, each rank in order."""
    stages = program.num_stages
    some = st.lists(st.integers(1, 4), min_size=stages, max_size=stages)
    costs = Costs(forward=draw(some), input_gradient=draw(some), weight_gradient=draw(some), step=draw(some))
    simulated = simulate(program, costs)
    table = program.table
    stretch = draw(st.integers(1, 3))
    delays = draw(st.lists(st.integers(0, 2), min_size=len(table), max_size=len(table)))
    starts, ends = [0.0] * len(table), [0.0] * len(table)
    for first, last in zip(table.first_row, table.first_row[1:]):
        passed = 0.0
        for row in range(first, last):
            if row - 1 in table.fused:
                starts[row], ends[row] = starts[row - 1], ends[row - 1]
                continue
            starts[row] = max(stretch * simulated.starts[row], passed)
            ends[row] = passed = starts[row] + simulated.ends[row] - simulated.starts[row] + delays[row] / 8
    return Timeline(program, Costs(), tuple(starts), tuple(ends))


def test_nothing_to_explain_is_refused() -> None:
    program = Program.from_csv("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", placement=linear(2))
    stuck = Program((program.streams[0][::-1], program.streams[1]), program.placement, 1)
    with pytest.raises(ScheduleError, match="can never have run"):
        explain(timeline(stuck, [(0, 0)] * 4, [(0, 0)] * 4))
