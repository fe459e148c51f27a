"""The three bubbles of a run agree where theory, simulation and measurement must."""

from collections.abc import Sequence

import pytest

from stagewright.cli.bubble import Bubble, MeasuredStep, compare_bubble
from stagewright.cli.trainer import measured_steps
from stagewright.schedules import Costs, Program, Schedule, Timeline, create, simulate
from stagewright.schedules.fitting import mean_costs


def compare(schedule: Schedule, timelines: Sequence[Timeline], seconds: float = 1.0) -> Bubble:
    """The bubbles of steps that took all ranks alike."""
    return compare_bubble(schedule, [MeasuredStep(timeline, (seconds,) * schedule.num_ranks) for timeline in timelines])


def test_a_run_that_goes_as_simulated_has_one_bubble() -> None:
    schedule = create("1f1b", num_ranks=4, num_microbatches=8)
    timeline = simulate(schedule.program(), Costs(forward=0.01, backward=0.03))
    bubble = compare(schedule, [timeline] * 3)
    assert bubble.formula == pytest.approx(3 / 11)  # (P-1) / (M+P-1)
    assert bubble.simulated == pytest.approx(3 / 11)
    assert bubble.measured == pytest.approx(3 / 11)
    assert bubble.formula_text == "(P-1)(F+B)"


def test_the_optimizer_step_is_work() -> None:
    schedule = create("gpipe", num_ranks=2, num_microbatches=1)
    timeline = simulate(schedule.program(), Costs(forward=1, backward=2, step=3))
    assert mean_costs([timeline]).step == (3, 3)
    bubble = compare(schedule, [timeline])
    assert bubble.measured == bubble.simulated
    assert bubble.measured < bubble.formula == pytest.approx(1 / 2)


def test_waiting_that_no_duration_explains_is_measured_but_not_simulated() -> None:
    schedule = create("gpipe", num_ranks=2, num_microbatches=1)
    slow = simulate(schedule.program(), Costs(forward=1, backward=2, send=3))
    bubble = compare(schedule, [slow])
    assert bubble.simulated == pytest.approx(1 / 2)
    assert bubble.measured == pytest.approx(1 - 6 / (2 * 12))


def test_what_theory_says_of_the_span_is_compared_with_the_span() -> None:
    schedule = create("zb-h2", num_ranks=4, num_microbatches=8)
    costs = Costs(forward=1, input_gradient=1, weight_gradient=1)
    bubble = compare(schedule, [simulate(schedule.program(), costs)])
    assert bubble.denominator == "idle / longest rank's span"
    assert (bubble.formula, bubble.simulated, bubble.measured) == pytest.approx((0, 0, 0), abs=1e-9)


@pytest.mark.parametrize("name", ["2bw", "pipedream"])
def test_an_asynchronous_schedule_is_busy_for_a_whole_period_once_it_is_full(name: str) -> None:
    """A batch takes each rank 4 x (1 + 2); where a step took 15 there were 3 in which it stood idle."""
    schedule = create(name, num_ranks=3, num_microbatches=4)
    timeline = simulate(schedule.program(), Costs(forward=1, backward=2))
    bubble = compare(schedule, [timeline] * 3, seconds=15)
    assert bubble.denominator == "idle / steady period, busiest rank"
    assert (bubble.formula, bubble.formula_text) == (0, "0")
    assert (bubble.simulated, bubble.measured) == pytest.approx((0, 3 / 15), abs=1e-9)


def test_what_one_slow_rank_leaves_the_others_to_wait_is_no_bubble_of_the_steady_state() -> None:
    schedule = create("2bw", num_ranks=2, num_microbatches=4)
    timeline = simulate(schedule.program(), Costs(forward=(1, 2), backward=(2, 4)))
    bubble = compare(schedule, [timeline], seconds=24)
    assert (bubble.simulated, bubble.measured) == pytest.approx((0, 0), abs=1e-9)


def test_costs_are_averaged_stage_by_stage_over_steps() -> None:
    program = create("1f1b", num_ranks=3, num_microbatches=4).program()
    steps = [simulate(program, Costs(forward=(1, 2, 3), backward=(4, 5, 6))), simulate(program, Costs(forward=3))]
    costs = mean_costs(steps)
    assert (costs.forward, costs.backward) == ((2, 2.5, 3), (5, 5.5, 6))  # a backward left out costs 2F
    assert costs.step == (0, 0, 0)


def test_split_and_fused_computations_keep_their_own_costs() -> None:
    text = "0F0,(0F1;0B0)OVERLAP_F_B,0I1,0W1\n"
    costs = Costs(forward=(2.0,), input_gradient=(3.0,), weight_gradient=(4.0,), overlapped=(6.0,))
    assert mean_costs([simulate(Program.from_csv(text), costs)]) == costs


@pytest.mark.parametrize(
    ("num_steps", "synchronous", "measured"),
    [
        (1, True, [0]),
        (2, True, [1]),
        (5, True, [1, 2, 3, 4]),
        (400, True, [*range(390, 400)]),
        (1, False, [0]),
        (5, False, [4]),
        (6, False, [1, 5]),
        (400, False, [391, 395, 399]),
    ],
)
def test_the_last_steps_are_measured_and_never_the_first_if_there_are_others(
    num_steps: int, synchronous: bool, measured: list[int]
) -> None:
    assert sorted(measured_steps(num_steps, synchronous=synchronous)) == measured
