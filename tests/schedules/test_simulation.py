"""The simulated clock: small timelines worked out by hand, published figures, and an independent reference."""

import csv
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stagewright.schedules import Costs, Program, ScheduleError, Timeline, create, find, names, simulate
from stagewright.schedules.costs import StageCosts
from stagewright.schedules.instructions import (
    Backward,
    Forward,
    InputGradient,
    Instruction,
    Overlap,
    ReduceGradient,
    SendActivation,
    SendGradient,
    Step,
    WeightGradient,
)
from stagewright.schedules.placement import waves

DATA = Path(__file__).parent.parent / "data"


def times(timeline: Timeline) -> dict[str, tuple[float, float]]:
    """Start and end of every instruction by its token."""
    return {str(event.instruction): (event.start, event.end) for events in timeline.events for event in events}


class TestByHand:
    def test_the_latency_of_a_message_delays_both_ways(self) -> None:
        timeline = simulate(Program.from_csv("0F0,0B0\n1F0,1B0"), Costs(forward=1, backward=2, send=0.5))
        assert times(timeline) == {
            "0F0": (0, 1),
            "0SEND_F0": (1, 1.5),
            "1RECV_F0": (0, 0),
            "1F0": (1.5, 2.5),
            "1B0": (2.5, 4.5),
            "1SEND_B0": (4.5, 5),
            "0RECV_B0": (0, 0),
            "0B0": (5, 7),
        }
        assert timeline.makespan == 7

    def test_latency_is_pipelined(self) -> None:
        """Three messages of latency 5 sent one after the other arrive one after the other, not 5 apart."""
        timeline = simulate(Program.from_csv("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2"), Costs(send=5))
        assert [times(timeline)[f"1F{microbatch}"] for microbatch in range(3)] == [(6, 7), (7, 8), (8, 9)]

    def test_a_channel_serves_in_order_and_each_message_keeps_it_until_it_has_left(self) -> None:
        """3 bytes at 2 bytes a tick leave in 1.5 ticks and arrive half a tick later."""
        program = Program.from_csv("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2")
        timeline = simulate(program, Costs(forward=1, backward=1, send=0.5, message_bytes=3, bandwidth=2))
        found = times(timeline)
        assert [found[f"0SEND_F{microbatch}"] for microbatch in range(3)] == [(1, 3), (2.5, 4.5), (4, 6)]
        assert [found[f"1F{microbatch}"] for microbatch in range(3)] == [(3, 4), (4.5, 5.5), (6, 7)]
        assert [found[f"1SEND_B{microbatch}"] for microbatch in range(3)] == [(8, 10), (9.5, 11.5), (11, 13)]
        assert [found[f"0B{microbatch}"] for microbatch in range(3)] == [(10, 11), (11.5, 12.5), (13, 14)]

    def test_the_two_directions_between_two_ranks_are_channels_of_their_own(self) -> None:
        """In a V, rank 0 sends rank 1 activations of stage 0 and gradients of stage 3: neither waits for the other."""
        text = "0F0,3F0,3B0,0F1,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,2B1,1B0,1B1"
        program = Program.from_csv(text, placement=waves(2))
        timeline = simulate(program, Costs(forward=1, backward=1, message_bytes=4, bandwidth=1))
        found = times(timeline)
        assert found["3B0"] == (12, 13)
        assert found["3SEND_B0"] == (13, 17)
        assert found["0F1"] == (13, 14)
        assert found["0SEND_F1"] == (14, 18)

    def test_stages_on_one_rank_hand_over_at_no_cost(self) -> None:
        timeline = simulate(
            Program.from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0", placement=waves(2)), Costs(backward=1, send=10)
        )
        found = times(timeline)
        assert found["1F0"] == (11, 12)
        assert found["2F0"] == (12, 13)
        assert found["3F0"] == (23, 24)

    def test_costs_of_single_stages(self) -> None:
        costs = Costs(forward=[1, 3], backward=[2, 4], send=[0.25, 99])
        found = times(simulate(Program.from_csv("0F0,0B0\n1F0,1B0"), costs))
        assert (found["0F0"], found["1F0"], found["1B0"], found["0B0"]) == (
            (0, 1),
            (1.25, 4.25),
            (4.25, 8.25),
            (8.5, 10.5),
        )

    def test_a_fused_pair_is_atomic(self) -> None:
        """It starts when both inputs are there, and both outputs leave at its end."""
        text = "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1"
        found = times(simulate(Program.from_csv(text), Costs(forward=1, backward=2, overlapped=[9, 2.5], send=2)))
        assert found["(1F1;1B0)OVERLAP_F_B"] == (4, 6.5)
        assert found["1SEND_B0"] == (6.5, 8.5)
        assert found["0B0"] == (8.5, 10.5)

    def test_a_fused_pair_takes_as_long_as_its_halves_where_nothing_else_is_said(self) -> None:
        text = "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1"
        found = times(simulate(Program.from_csv(text), Costs(forward=1, backward=2)))
        assert found["(1F1;1B0)OVERLAP_F_B"] == (2, 5)

    def test_recomputing_delays_the_first_gradient(self) -> None:
        program = Program.from_csv("0F0,0I0,0W0")
        found = times(simulate(program, Costs(input_gradient=2, weight_gradient=3, recompute=1)))
        assert found == {"0F0": (0, 1), "0I0": (1, 4), "0W0": (4, 7)}

    def test_a_step_waits_for_the_reduction_over_all_replicas_which_begins_with_the_last_of_them(self) -> None:
        text = "0F0,0B0,0REDUCE_GRAD,1F1,1B1,1REDUCE_GRAD,0STEP@1,1STEP@1\n"
        text += "1F0,1B0,1REDUCE_GRAD,0F1,0B1,0REDUCE_GRAD,1STEP@1,0STEP@1"
        timeline = simulate(Program.from_csv(text), Costs(reduce=4, step=0.5))
        rank_0, rank_1 = [
            {str(event.instruction): (event.start, event.end) for event in events} for events in timeline.events
        ]
        assert (rank_0["0B0"], rank_1["0B1"]) == ((4, 6), (9, 11))
        assert rank_0["0REDUCE_GRAD"] == rank_1["0REDUCE_GRAD"] == (11, 15)
        assert (rank_1["1B0"], rank_0["1B1"]) == ((2, 4), (7, 9))
        assert rank_0["1REDUCE_GRAD"] == rank_1["1REDUCE_GRAD"] == (9, 13)
        assert (rank_0["0STEP@1"], rank_0["1STEP@1"]) == ((15, 15.5), (15.5, 16))
        assert (rank_1["1STEP@1"], rank_1["0STEP@1"]) == ((13, 13.5), (15, 15.5))
        assert timeline.makespan == 16

    def test_a_step_waits_for_the_scalars_of_all_ranks_which_travel_while_their_ranks_go_on(self) -> None:
        text = "0F0,0B0,SYNC_SCALARS,0STEP@1\n1F0,1B0,SYNC_SCALARS,1STEP@1"
        timeline = simulate(Program.from_csv(text), Costs(step=1, send=0.5))
        rank_0, rank_1 = [[(event.start, event.end) for event in events[-2:]] for events in timeline.events]
        assert rank_0 == [(7, 7.5), (7, 8)]  # the scalars of rank 1 have been there since 5
        assert rank_1 == [(4.5, 5), (7.5, 8.5)]
        assert timeline.makespan == 8.5

    def test_a_program_that_waits_in_a_circle_is_refused(self) -> None:
        with pytest.raises(ScheduleError, match="wait for each other"):
            simulate(Program.from_csv("0B0,0F0\n1F0,1B0"))


class Reference:
    """The semantics once more, as directly as they can be said: every rank goes on as long as its next input is there.

    It shares nothing with the simulation but the instructions.
    """

    def __init__(self, program: Program, costs: StageCosts) -> None:
        self.program, self.costs = program, costs
        self.clock = [0.0] * program.num_ranks
        self.made: dict[tuple[str, int, int], tuple[int, float]] = {}  # output -> (rank, when made)
        self.arrived: dict[tuple[str, int, int], float] = {}
        self.left: dict[tuple[int, int, str], float] = defaultdict(float)
        self.delivered: dict[tuple[int, int, str], float] = defaultdict(float)
        self.reduced: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        self.num_reductions: dict[tuple[int, int], int] = defaultdict(int)

    def run(self) -> list[list[tuple[float, float]]]:
        """Start and end of everything that computes or steps, rank by rank."""
        spans: list[list[tuple[float, float]]] = [[] for _ in self.program.streams]
        position = [0] * self.program.num_ranks
        while any(at < len(stream) for at, stream in zip(position, self.program.streams)):
            before = list(position)
            for rank, stream in enumerate(self.program.streams):
                while position[rank] < len(stream) and self.execute(rank, stream[position[rank]], spans[rank]):
                    position[rank] += 1
            assert position != before, "the reference is stuck"
        return spans

    def execute(self, rank: int, instruction: Instruction, spans: list[tuple[float, float]]) -> bool:
        """Do an instruction, or say that something is missing yet."""
        match instruction:
            case SendActivation(stage, microbatch):
                self.send(rank, "F", stage, stage + 1, microbatch, self.costs.send[stage], self.costs.transfer[stage])
            case SendGradient(stage, microbatch):
                latency, transfer = self.costs.send[stage - 1], self.costs.transfer[stage - 1]
                self.send(rank, "B", stage, stage - 1, microbatch, latency, transfer)
            case ReduceGradient(stage):
                turn = self.num_reductions[rank, stage]
                self.num_reductions[rank, stage] += 1
                self.reduced[stage, turn][rank] = self.clock[rank]
            case Step(stage, version):
                issued = self.reduced[stage, version - 1]
                if self.num_reductions[rank, stage] and len(issued) < len(self.program.placement.replicas_of(stage)):
                    return False
                reduced = max(issued.values()) + self.costs.reduce[stage] if issued else 0.0
                self.compute(rank, reduced, self.costs.step[stage], spans)
            case Forward() | Backward() | InputGradient() | WeightGradient():
                return self.compute_all(rank, [instruction], self.duration(instruction), spans)
            case Overlap(forward, backward):
                fused = self.costs.overlapped
                whole = self.duration(forward) + self.duration(backward)
                return self.compute_all(
                    rank, [forward, backward], whole if fused is None else fused[forward.stage], spans
                )
        return True

    def send(
        self, rank: int, kind: str, stage: int, to_stage: int, microbatch: int, latency: float, transfer: float
    ) -> None:
        channel = (rank, self.program.placement.rank_of(to_stage, microbatch), kind)
        start = max(self.clock[rank], self.left[channel])
        self.left[channel] = start + transfer
        self.delivered[channel] = max(self.delivered[channel], start + transfer + latency)
        self.arrived[kind, stage, microbatch] = self.delivered[channel]

    def compute_all(
        self, rank: int, parts: list[Instruction], duration: float, spans: list[tuple[float, float]]
    ) -> bool:
        ready = [self.input_of(rank, part) for part in parts]
        if any(when is None for when in ready):
            return False
        self.compute(rank, max(when for when in ready if when is not None), duration, spans)
        for part in parts:
            if isinstance(part, Forward):
                self.made["F", part.stage, part.microbatch] = (rank, self.clock[rank])
            elif isinstance(part, Backward | InputGradient):
                self.made["B", part.stage, part.microbatch] = (rank, self.clock[rank])
        return True

    def compute(self, rank: int, ready: float, duration: float, spans: list[tuple[float, float]]) -> None:
        start = max(self.clock[rank], ready)
        self.clock[rank] = start + duration
        spans.append((start, self.clock[rank]))

    def input_of(self, rank: int, part: Instruction) -> float | None:
        """When the input of a computation is there: it was made on this rank, or has arrived."""
        match part:
            case Forward(0, _) | WeightGradient():
                return 0.0
            case Forward(stage, microbatch):
                needed = ("F", stage - 1, microbatch)
            case Backward(stage, microbatch) | InputGradient(stage, microbatch):
                if stage == self.program.num_stages - 1:
                    return 0.0
                needed = ("B", stage + 1, microbatch)
        made = self.made.get(needed)
        return made[1] if made is not None and made[0] == rank else self.arrived.get(needed)

    def duration(self, part: Instruction) -> float:
        match part:
            case Forward(stage):
                return self.costs.forward[stage]
            case InputGradient(stage):
                return self.costs.input_gradient[stage]
            case WeightGradient(stage):
                return self.costs.weight_gradient[stage]
            case Backward(stage):
                return self.costs.backward[stage]
        raise AssertionError(part)


@st.composite
def programs_and_costs(draw: st.DrawFn) -> tuple[Program, Costs]:
    """Any schedule at a small shape, with whole-numbered costs that differ from stage to stage."""
    name = draw(st.sampled_from(names()))
    num_ranks, num_microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 10))
    try:
        program = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches).program(draw(st.integers(1, 2)))
    except ScheduleError:
        assume(False)
    numbers = st.lists(st.integers(0, 6), min_size=program.num_stages, max_size=program.num_stages)
    kinds = ("forward", "input_gradient", "weight_gradient", "backward", "step", "reduce", "recompute")
    costs = {kind: draw(numbers) for kind in kinds}
    if draw(st.booleans()):
        costs["overlapped"] = draw(numbers)
    if draw(st.booleans()):
        costs |= {"send": draw(numbers), "message_bytes": draw(numbers)}
    return program, Costs(**costs, bandwidth=draw(st.sampled_from([1, 2, 4])))


@given(programs_and_costs())
def test_the_simulation_agrees_with_the_reference_on_every_schedule(case: tuple[Program, Costs]) -> None:
    program, costs = case
    kinds = (Forward, Backward, InputGradient, WeightGradient, Overlap, Step)
    simulated = [
        [(event.start, event.end) for event in events if isinstance(event.instruction, kinds)]
        for events in simulate(program, costs).events
    ]
    assert simulated == Reference(program, costs.of_stages(program.num_stages)).run()


def published() -> list[dict[str, str]]:
    """Tables 5 and 9 of the zero-bubble paper (Qi et al., ICLR 2024): profiled durations and bubble rates."""
    with (DATA / "zero_bubble_tables_5_and_9.csv").open() as file:
        return list(csv.DictReader(file))


# Of the profiled models: hidden size, attention heads; both at a sequence length of 1024.
WIDTHS = {"1.5B": (2304, 24), "14.6B": (5120, 40)}


class TestPublished:
    """The bubble rates of the zero-bubble paper: (cost - M(F+I+W)) / cost, where cost is the longest span of a rank."""

    @staticmethod
    def bubble(name: str, row: dict[str, str], **options: object) -> float:
        hidden, heads = WIDTHS[row["model"]]
        costs = Costs(
            forward=float(row["F"]),
            input_gradient=float(row["I"]),
            weight_gradient=float(row["W"]),
            send=float(row["send"]),
            # In units of the microbatch size and sequence length: F stashes 34h + 5as bytes, of which W needs 32h.
            activation_bytes=2 * hidden + 5 * heads * 1024,
            weight_bytes=32 * hidden,
        )
        takes_costs = "costs" in {field.name for field in fields(find(name))}
        options |= {"costs": costs} if takes_costs else {}
        schedule = create(name, num_ranks=int(row["P"]), num_microbatches=int(row["M"]), **options)
        return simulate(schedule.program(), costs).span_bubble

    @pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
    @pytest.mark.parametrize("row", published(), ids=lambda row: f"{row['model']}-M{row['M']}")
    def test_fixed_orders_give_the_published_rate_to_four_digits(self, name: str, row: dict[str, str]) -> None:
        assert self.bubble(name, row) == pytest.approx(float(row[name]), abs=0.5e-4 + 1e-9)

    @pytest.mark.parametrize("name", ["zb-1p", "zb-2p"])
    @pytest.mark.parametrize("row", published(), ids=lambda row: f"{row['model']}-M{row['M']}")
    def test_searched_orders_are_no_worse_than_published(self, name: str, row: dict[str, str]) -> None:
        assert self.bubble(name, row) <= float(row[name]) + 0.5e-4


def span_bubble(name: str, costs: Costs, **options: object) -> float:
    """The per-rank-span bubble at P=8, M=32, with an order made for these costs where the schedule can do that."""
    takes_costs = "costs" in {field.name for field in fields(find(name))}
    options |= {"costs": costs} if takes_costs else {}
    return simulate(create(name, num_ranks=8, num_microbatches=32, **options).program(), costs).span_bubble


class TestUnequalCosts:
    """F:I:W = 1:1.3:0.7 at P=8, M=32, on which orders made for equal costs lose much."""

    costs = Costs(forward=1, input_gradient=1.3, weight_gradient=0.7)

    @pytest.mark.parametrize(("name", "bubble"), [("1f1b", 7 / 39), ("interleaved", 0.099), ("gis", 0.077)])
    def test_what_fixed_orders_lose(self, name: str, bubble: float) -> None:
        assert span_bubble(name, self.costs) == pytest.approx(bubble, abs=0.5e-3 + 1e-9)

    @pytest.mark.parametrize(("name", "bubble"), [("zb-1p", 0.105), ("zb-2p", 0.055)])
    def test_what_list_schedules_lose(self, name: str, bubble: float) -> None:
        """The published ones were made for these costs too."""
        assert span_bubble(name, self.costs) <= bubble + 0.5e-3

    @pytest.mark.parametrize(("name", "bubble"), [("zbv", 0.039), ("v-half", 0.119), ("v-min", 0.310)])
    def test_orders_made_for_these_costs_lose_less(self, name: str, bubble: float) -> None:
        assert span_bubble(name, self.costs) < bubble


class TestDualPipe:
    """Idle time with fused pairs that take as long as their halves: F=1, B=2, I=W=1, F&B=3."""

    @pytest.mark.parametrize(("num_ranks", "idle"), [(2, 0), (4, 2), (8, 6)])
    @pytest.mark.parametrize("batches", [1, 2])
    def test_both_directions(self, num_ranks: int, idle: float, batches: int) -> None:
        num_microbatches = 2 * num_ranks * batches
        schedule = create("dualpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)
        timeline = simulate(schedule.program(), Costs(overlapped=3))
        assert timeline.makespan == 3 * num_microbatches + idle
        assert timeline.busy == (3 * num_microbatches,) * num_ranks
        assert max(timeline.peak_stash) == num_ranks + 1

    def test_a_fused_pair_that_takes_less_than_its_halves_shortens_the_step(self) -> None:
        schedule = create("dualpipe", num_ranks=4, num_microbatches=8)
        assert simulate(schedule.program(), Costs(overlapped=2.4)).makespan == pytest.approx(23.6)

    def test_the_formula_is_an_upper_bound_where_the_input_gradient_takes_longer_than_the_forward(self) -> None:
        costs = Costs(forward=1, input_gradient=1.3, weight_gradient=0.7, overlapped=2.6)
        schedule = create("dualpipe", num_ranks=8, num_microbatches=16)
        timeline = simulate(schedule.program(), costs)
        formula = schedule.bubble_formula(costs)
        assert formula is not None
        assert formula.idle == pytest.approx(7.5)
        assert max(timeline.makespan - busy for busy in timeline.busy) == pytest.approx(6.6)

    @pytest.mark.parametrize(("num_ranks", "idle"), [(4, 6), (8, 14)])
    def test_in_a_v(self, num_ranks: int, idle: float) -> None:
        schedule = create("dualpipev", num_ranks=num_ranks, num_microbatches=2 * num_ranks)
        timeline = simulate(schedule.program(), Costs(overlapped=3))
        assert timeline.makespan == 12 * num_ranks + idle
        assert max(timeline.peak_stash) == 2 * num_ranks + 1
