"""What a timeline says: spans, bubbles, the steady period, memory, and why it took so long."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stagewright.schedules import Costs, Program, ScheduleError, Timeline, create, find, names, simulate
from stagewright.schedules.instructions import SyncScalars, parse
from stagewright.schedules.linearize import linearize, waits_of
from stagewright.schedules.timing import RowCosts, row_costs, time_rows

SYNCHRONOUS = [name for name in names() if find(name).synchronous]


def timeline_of(
    name: str, num_ranks: int, num_microbatches: int, costs: Costs | None = None, steps: int = 1
) -> Timeline:
    schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return simulate(schedule.program(steps), costs)


class TestBubbles:
    def test_the_two_denominators(self) -> None:
        """1F1B with P=4, M=8: idle (P-1)(F+B) = 9 beside 24 of work."""
        timeline = timeline_of("1f1b", 4, 8)
        assert timeline.makespan == 33
        assert timeline.ideal == 24
        assert timeline.bubble_fraction == pytest.approx(9 / 33)
        assert timeline.bubble_overhead == pytest.approx(9 / 24)

    def test_the_three_spans_of_zb_h2(self) -> None:
        """Every rank works without a pause, the ranks are only shifted: no bubble but for an optimizer barrier."""
        timeline = timeline_of("zb-h2", 4, 8)
        assert (timeline.makespan, timeline.span, timeline.steady_period) == (27, 24, 24)
        assert (timeline.span_bubble, timeline.steady_bubble) == (0, 0)
        assert timeline.bubble_fraction == pytest.approx(3 / 27)

    def test_a_step_counts_in_the_makespan_and_the_steady_period_but_not_in_the_span(self) -> None:
        timeline = timeline_of("1f1b", 4, 8, Costs(step=2))
        assert (timeline.makespan, timeline.span, timeline.steady_period) == (35, 33, 35)
        assert timeline.ideal == 26
        assert timeline.span_bubble == pytest.approx(9 / 33)
        assert timeline.bubble_overhead == pytest.approx(9 / 26)

    def test_ranks_of_unequal_speed(self) -> None:
        """The ideal is the busiest rank's work; the fraction counts everyone's idle time."""
        timeline = simulate(Program.from_csv("0F0,0B0\n1F0,1B0"), Costs(forward=[1, 3], backward=[2, 6]))
        assert timeline.busy == (3, 9)
        assert timeline.makespan == 12
        assert timeline.bubble_overhead == pytest.approx(3 / 9)
        assert timeline.bubble_fraction == pytest.approx(12 / 24)

    def test_times_count_from_the_first_start_whatever_the_clock_showed(self) -> None:
        """A measured timeline has the clock's numbers."""
        simulated = timeline_of("zb-h1", 4, 8)
        measured = Timeline(
            simulated.program,
            Costs(),
            tuple(1e3 + 0.5 * start for start in simulated.starts),
            tuple(1e3 + 0.5 * end for end in simulated.ends),
        )
        for figure in ("makespan", "span", "ideal", "steady_period"):
            assert getattr(measured, figure) == pytest.approx(getattr(simulated, figure) / 2)
        for figure in (
            "bubble_fraction",
            "bubble_overhead",
            "span_bubble",
            "steady_bubble",
            "peak_stash",
            "peak_bytes",
        ):
            assert getattr(measured, figure) == pytest.approx(getattr(simulated, figure))

    def test_a_program_that_takes_no_time_has_no_bubble(self) -> None:
        timeline = timeline_of("gpipe", 2, 2, Costs(forward=0, backward=0))
        assert (timeline.makespan, timeline.bubble_fraction, timeline.bubble_overhead, timeline.span_bubble) == (0,) * 4


class TestSteadyPeriod:
    @pytest.mark.parametrize("name", ["2bw", "pipedream"])
    @pytest.mark.parametrize("steps", [3, 4, 7])
    def test_without_a_flush_a_batch_takes_its_work_and_nothing_more(self, name: str, steps: int) -> None:
        timeline = timeline_of(name, 4, 8, Costs(forward=2, backward=3), steps)
        assert timeline.steady_period == 8 * (2 + 3)
        assert timeline.steady_bubble == 0

    @pytest.mark.parametrize("name", ["2bw", "pipedream"])
    def test_latency_makes_a_full_pipeline_wait_for_the_round_trip(self, name: str) -> None:
        """P microbatches are in flight from rank 0, and one takes P(F+B) + 2(P-1) hops to come back."""
        timeline = timeline_of(name, 4, 8, Costs(send=0.5), steps=6)
        assert timeline.steady_period == pytest.approx(8 * (4 * 3 + 6 * 0.5) / 4)

    @pytest.mark.parametrize("steps", [1, 2])
    def test_too_few_batches_do_not_show_it(self, steps: int) -> None:
        with pytest.raises(ScheduleError, match=r"simulate schedule.program\(steps=3\) or more"):
            timeline_of("2bw", 4, 8, steps=steps).steady_period  # noqa: B018

    def test_a_flush_costs_as_much_every_time(self) -> None:
        assert timeline_of("1f1b", 4, 8).steady_period == 33

    def test_a_program_that_has_a_barrier_keeps_it(self) -> None:
        """With a SYNC_SCALARS in front of the steps, ZB-H2 takes its makespan batch after batch."""
        program = create("zb-h2", num_ranks=4, num_microbatches=8).program()
        streams = [(*stream[:-1], SyncScalars(), stream[-1]) for stream in program.streams]
        assert simulate(program).steady_period == 24
        assert simulate(replace(program, streams=tuple(streams))).steady_period == 27

    @given(
        st.sampled_from(SYNCHRONOUS),
        st.integers(1, 5),
        st.integers(1, 8),
        st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, 1.25, 2.0, 3.0])] * 4),
    )
    def test_it_is_what_many_batches_in_a_row_take(
        self, name: str, num_ranks: int, num_microbatches: int, durations: tuple[float, ...]
    ) -> None:
        forward, input_gradient, weight_gradient, send = durations
        costs = Costs(
            forward=forward + 1,
            input_gradient=input_gradient,
            weight_gradient=weight_gradient,
            send=send,
            message_bytes=1,
            bandwidth=2,
            step=0.25,
        )
        try:
            schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        except ScheduleError:
            assume(False)
        period = simulate(schedule.program(), costs).steady_period
        long = [simulate(schedule.program(steps), costs) for steps in (6, 18)]
        assert (long[1].makespan - long[0].makespan) / 12 == pytest.approx(period)
        assert long[0].steady_period == pytest.approx(period)

    @given(st.sampled_from(SYNCHRONOUS), st.integers(1, 5), st.integers(1, 8))
    def test_it_lies_between_the_work_and_the_makespan(self, name: str, num_ranks: int, num_microbatches: int) -> None:
        try:
            timeline = timeline_of(name, num_ranks, num_microbatches)
        except ScheduleError:
            assume(False)
        assert timeline.ideal <= timeline.steady_period <= timeline.makespan
        assert timeline.ideal <= timeline.span <= timeline.makespan


class TestMemory:
    def test_a_stash_goes_in_two_parts_where_the_backward_is_split(self) -> None:
        """F0 [0,1], F1 [1,2], I0 [2,3], W0 [3,4], I1 [4,5], W1 [5,6], with 3 bytes for I and 2 more for W."""
        program = Program.from_csv("0F0,0F1,0I0,0W0,0I1,0W1")
        timeline = simulate(program, Costs(activation_bytes=3, weight_bytes=2))
        assert timeline.memory[0].times == (0, 1, 3, 4, 5, 6)
        assert timeline.memory[0].values == (5, 10, 7, 5, 2, 0)
        assert timeline.peak_bytes == (10,)
        assert timeline.peak_stash == (2,)

    def test_what_a_backward_frees_the_next_forward_takes(self) -> None:
        program = Program.from_csv("0F0,0B0,0F1,0B1")
        assert simulate(program).memory[0].values == (1, 1, 0)
        assert simulate(program).memory[0].times == (0, 3, 6)

    def test_a_fused_pair_holds_both_of_its_microbatches(self) -> None:
        timeline = simulate(Program.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1"), Costs(overlapped=3))
        assert timeline.peak_stash == (2,)
        assert timeline.memory[0].times == (0, 1, 4, 6)
        assert timeline.memory[0].values == (1, 2, 1, 0)

    def test_bytes_of_single_stages(self) -> None:
        timeline = simulate(Program.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"), Costs(weight_bytes=[10, 7]))
        assert timeline.peak_bytes == (20, 7)

    @given(st.sampled_from(names()), st.integers(1, 6), st.integers(1, 12))
    def test_by_default_bytes_count_stashes(self, name: str, num_ranks: int, num_microbatches: int) -> None:
        try:
            timeline = timeline_of(name, num_ranks, num_microbatches)
        except ScheduleError:
            assume(False)
        assert timeline.peak_bytes == timeline.peak_stash
        for curve in timeline.memory:
            assert curve.values[-1] == 0
            assert all(earlier <= later for earlier, later in pairwise(curve.times))


class TestWhy:
    """Each event says what it waited for; the critical path follows that from the end to the start."""

    def test_what_an_instruction_waited_for(self) -> None:
        timeline = simulate(Program.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"), Costs(send=0.5))
        found = {
            str(event.instruction): (event.rank, event.waited, event.waited_for and str(event.waited_for))
            for events in timeline.events
            for event in events
        }
        # Rank 1: F0 waits for the first message; F1 is there before its turn. Rank 0: B0 waits for 1B0 and the message.
        assert found["0F0"] == (0, 0, None)
        assert found["1F0"] == (1, 1.5, "0SEND_F0")
        assert found["1F1"] == (1, 0, None)
        assert found["0B0"] == (0, 3, "1SEND_B0")
        assert found["0B1"] == (0, 1, "1SEND_B1")

    def test_a_message_waits_for_the_one_before_it_on_its_channel(self) -> None:
        costs = Costs(forward=1, message_bytes=3, bandwidth=2)
        timeline = simulate(Program.from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1"), costs)
        second = next(event for event in timeline.events[0] if str(event.instruction) == "0SEND_F1")
        assert (second.start, second.waited, second.waited_for) == (2.5, 0.5, parse("0SEND_F0"))

    def test_a_step_waits_for_the_slowest_replica(self) -> None:
        text = "0F0,0B0,0REDUCE_GRAD,1F1,1B1,1REDUCE_GRAD,0STEP@1,1STEP@1\n"
        text += "1F0,1B0,1REDUCE_GRAD,0F1,0B1,0REDUCE_GRAD,1STEP@1,0STEP@1"
        timeline = simulate(Program.from_csv(text), Costs(reduce=4))
        step = timeline.events[0][-2]
        assert (step.start, step.waited, step.waited_for) == (15, 6, parse("0REDUCE_GRAD"))
        path = timeline.critical_path
        assert [str(event.instruction) for event in path.events][-3:] == ["0B1", "0REDUCE_GRAD", "0STEP@1"]
        assert (path.computing, path.communicating) == (11, 4)

    def test_the_critical_path_of_one_microbatch_is_the_way_there_and_back(self) -> None:
        timeline = simulate(Program.from_csv("0F0,0B0\n1F0,1B0"), Costs(send=0.5))
        path = timeline.critical_path
        assert [(event.rank, str(event.instruction)) for event in path.events] == [
            (0, "0F0"),
            (0, "0SEND_F0"),
            (1, "1F0"),
            (1, "1B0"),
            (1, "1SEND_B0"),
            (0, "0B0"),
        ]
        assert (path.computing, path.communicating, path.idle) == (6, 1, 0)

    @given(
        st.sampled_from(names()),
        st.integers(1, 5),
        st.integers(1, 8),
        st.sampled_from([Costs(), Costs(send=0.5), Costs(send=0.25, message_bytes=3, bandwidth=2, step=1, reduce=2)]),
    )
    def test_the_critical_path_fills_the_makespan(
        self, name: str, num_ranks: int, num_microbatches: int, costs: Costs
    ) -> None:
        try:
            timeline = timeline_of(name, num_ranks, num_microbatches, costs)
        except ScheduleError:
            assume(False)
        path = timeline.critical_path
        assert path.computing + path.communicating == pytest.approx(timeline.makespan)
        assert path.idle == pytest.approx(0)
        assert path.events[0].start == 0
        assert all(earlier.start <= later.start for earlier, later in pairwise(path.events))

    @given(st.sampled_from(names()), st.integers(1, 5), st.integers(1, 8), st.data())
    def test_whatever_gets_slower_on_it_makes_the_whole_slower_by_as_much(
        self, name: str, num_ranks: int, num_microbatches: int, data: st.DataObject
    ) -> None:
        try:
            timeline = timeline_of(name, num_ranks, num_microbatches)
        except ScheduleError:
            assume(False)
        event = data.draw(st.sampled_from(timeline.critical_path.events))
        table = timeline.program.table
        position = timeline.events[event.rank].index(event)
        row = next(
            row
            for row in range(table.first_row[event.rank], len(table))
            if table.position[row] == position and table.rank[row] == event.rank
        )
        costs = row_costs(table, Costs())
        slower = RowCosts([took + (at == row) for at, took in enumerate(costs.durations)])
        waits = waits_of(table)
        starts, ends = time_rows(table, waits, linearize(table, waits), slower)
        assert Timeline(timeline.program, Costs(), tuple(starts), tuple(ends)).makespan == timeline.makespan + 1


def test_events_follow_the_stream() -> None:
    timeline = timeline_of("1f1b", 2, 2)
    for rank, (events, stream) in enumerate(zip(timeline.events, timeline.program.streams)):
        assert tuple(event.instruction for event in events) == stream
        assert {event.rank for event in events} == {rank}
