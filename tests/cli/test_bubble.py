"""The three bubbles of a run agree where theory, simulation and measurement must."""

import pytest

from stagewright.cli.bubble import compare_bubble, mean_costs
from stagewright.schedules import Costs, Program, create, simulate


def test_a_run_that_goes_as_simulated_has_one_bubble() -> None:
    schedule = create("1f1b", num_ranks=4, num_microbatches=8)
    timeline = simulate(schedule.program(), Costs(forward=0.01, backward=0.03))
    bubble = compare_bubble(schedule, [timeline] * 3)
    assert bubble.formula == pytest.approx(3 / 11)  # (P-1) / (M+P-1)
    assert bubble.simulated == pytest.approx(3 / 11)
    assert bubble.measured == pytest.approx(3 / 11)
    assert bubble.formula_text == "(P-1)(F+B)"


def test_waiting_that_no_duration_explains_is_measured_but_not_simulated() -> None:
    schedule = create("gpipe", num_ranks=2, num_microbatches=1)
    slow = simulate(schedule.program(), Costs(forward=1, backward=2, send=3))
    bubble = compare_bubble(schedule, [slow])
    assert bubble.simulated == pytest.approx(1 / 2)
    assert bubble.measured == pytest.approx(1 - 6 / (2 * 12))


def test_what_theory_says_of_the_span_is_compared_with_the_span() -> None:
    schedule = create("zb-h2", num_ranks=4, num_microbatches=8)
    costs = Costs(forward=1, input_gradient=1, weight_gradient=1)
    bubble = compare_bubble(schedule, [simulate(schedule.program(), costs)])
    assert bubble.denominator == "idle / longest rank's span"
    assert (bubble.formula, bubble.simulated, bubble.measured) == pytest.approx((0, 0, 0), abs=1e-9)


def test_costs_are_averaged_stage_by_stage_over_steps() -> None:
    program = create("1f1b", num_ranks=3, num_microbatches=4).program()
    steps = [simulate(program, Costs(forward=(1, 2, 3), backward=(4, 5, 6))), simulate(program, Costs(forward=3))]
    assert mean_costs(steps) == Costs(forward=(2, 2.5, 3), backward=(5, 5.5, 6))  # a backward left out costs 2F


def test_split_and_fused_computations_keep_their_own_costs() -> None:
    text = "0F0,(0F1;0B0)OVERLAP_F_B,0I1,0W1\n"
    costs = Costs(forward=(2.0,), input_gradient=(3.0,), weight_gradient=(4.0,), overlapped=(6.0,))
    assert mean_costs([simulate(Program.from_csv(text), costs)]) == costs
