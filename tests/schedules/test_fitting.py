"""Fitting: the costs of a made-up timeline, and of a simulated one as the engine would have recorded it."""

from collections.abc import Sequence

import pytest

from stagewright.schedules import Costs, Program, Timeline, create, simulate
from stagewright.schedules.fitting import fit_costs, mean_costs
from stagewright.schedules.placement import linear
from stagewright.schedules.table import STEP

TWO_RANKS = Program.from_csv(
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0STEP@1\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1STEP@1",
    placement=linear(2),
)


def timeline(*of_ranks: Sequence[tuple[float, float]]) -> Timeline:
    """Start and end of each instruction, rank by rank."""
    times = [time for of_rank in of_ranks for time in of_rank]
    return Timeline(TWO_RANKS, Costs(), tuple(start for start, _ in times), tuple(end for _, end in times))


# Rank 0 is busy for 0.25 with each SEND. A message is there 0.5 later. Rank 1 takes 0.125 to take F1, which lies there.
MEASURED = timeline(
    [(0, 1), (1, 1.25), (1.25, 2.25), (2.25, 2.5), (2.5, 2.5), (5.75, 7.75), (7.75, 7.75), (9.125, 11.125),
     (11.125, 12)],
    [(0, 0), (1.75, 3.25), (3.25, 5.25), (5.25, 5.25), (5.25, 5.5), (5.625, 6.625), (6.625, 8.625), (8.625, 8.625),
     (8.625, 8.625)],
)  # fmt: skip


def test_durations_alone_are_means_of_each_stage() -> None:
    costs = mean_costs([MEASURED])
    assert costs == Costs(forward=(1, 1.25), backward=(2, 2), step=(0.875, 0))


def test_fitted_costs_have_in_them_what_a_rank_does_for_messages() -> None:
    """F of stage 0 with its SEND: 1.25. B of stage 1: once with nothing, once with 0.25 for posting what comes next."""
    costs = fit_costs([MEASURED])
    assert costs.forward == (1.25, 1.25 + 0.125)
    assert costs.backward == (2, 2.125)
    assert costs.step == (0.875, 0)


def test_a_hop_is_from_the_end_of_a_send_to_the_start_of_what_stood_idle_for_it() -> None:
    """Three were waited for, each 0.5 on its way, of which a rank takes 0.125 to take it."""
    costs = fit_costs([MEASURED])
    assert costs.send == (0.375, 0.375)


def test_one_disturbed_step_does_not_count() -> None:
    late = Timeline(
        TWO_RANKS, Costs(), tuple(4 * time for time in MEASURED.starts), tuple(4 * time for time in MEASURED.ends)
    )
    assert fit_costs([MEASURED, late, MEASURED]) == fit_costs([MEASURED])


def recorded(simulated: Timeline) -> Timeline:
    """A simulation as the engine records a run: a SEND or a reduction stands where its rank is busy with it."""
    table = simulated.program.table
    ends = list(simulated.ends)
    starts = list(simulated.starts)
    for first, last in zip(table.first_row, table.first_row[1:]):
        passed = 0.0
        for row in range(first, last):
            if table.operation[row] <= 3 or table.operation[row] == 13:
                passed = ends[row] if row - 1 not in table.fused else passed
            else:
                starts[row] = ends[row] = passed
    return Timeline(simulated.program, simulated.costs, tuple(starts), tuple(ends))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-h2", "zbv", "v-min", "interleaved", "chimera", "gis"])
def test_a_simulation_with_fitted_costs_is_that_which_they_were_fitted_to(name: str) -> None:
    """Stages of different sizes, hops, updates, sums over replicas."""
    program = create(name, num_ranks=4, num_microbatches=8).program()
    costs = uneven_costs(program.num_stages)
    simulated = simulate(program, costs)
    predicted = simulate(program, fit_costs([recorded(simulated)]))
    assert predicted.makespan == pytest.approx(simulated.makespan, rel=1e-9)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
def test_fused_pairs_are_known_by_the_stage_of_their_forward_alone(name: str) -> None:
    """Their backward may be that of several stages, whose mean is taken."""
    program = create(name, num_ranks=4, num_microbatches=8).program()
    simulated = simulate(program, uneven_costs(program.num_stages))
    predicted = simulate(program, fit_costs([recorded(simulated)]))
    assert predicted.makespan == pytest.approx(simulated.makespan, rel=0.02)


def uneven_costs(num_stages: int) -> Costs:
    """Three sizes of stages, with hops and updates."""
    stages = range(num_stages)
    return Costs(
        forward=[1 + 0.25 * (stage % 3) for stage in stages],
        backward=[2 + 0.25 * (stage % 3) for stage in stages],
        send=0.125,
        step=0.5,
    )


def test_a_sum_over_copies_counts_also_on_the_rank_that_came_last_to_it() -> None:
    """There the STEPs of other stages stand between: a rank updates all of its stages at the last of them."""
    program = create("dualpipe", num_ranks=2, num_microbatches=4).program()
    simulated = recorded(simulate(program, Costs(reduce=3)))
    starts, ends = list(simulated.starts), list(simulated.ends)
    table = program.table
    for rank in range(2):
        rows = range(table.first_row[rank], table.first_row[rank + 1])
        *others, last = [row for row in rows if table.operation[row] == STEP]
        assert last == rows[-1]
        for row in others:
            starts[row] = ends[row - 1]
            ends[row] = starts[row] + 0.001
    costs = fit_costs([Timeline(program, Costs(), tuple(starts), tuple(ends))])
    assert costs.reduce == pytest.approx((3, 0), abs=0.01)
