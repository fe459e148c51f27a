"""The text grid, literally."""

import pytest

from stagewright.schedules import Costs, Program, create, simulate
from stagewright.schedules.drawing import grid_text


def grid(name: str, num_ranks: int, num_microbatches: int, costs: Costs | None = None, **options: object) -> str:
    schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    return grid_text(simulate(schedule.program(), costs))


def of_tokens(text: str, costs: Costs | None = None) -> str:
    return grid_text(simulate(Program.from_csv(text), costs))


def lines(*rows: str) -> str:
    return "\n".join(rows)


def test_1f1b() -> None:
    assert grid("1f1b", 4, 4) == lines(
        "rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 -- .. B1 -- .. B2 -- .. B3 --",
        "rank 1  .. F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 -- .. ..",
        "rank 2  .. .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. .. .. ..",
        "rank 3  .. .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. .. .. ..",
    )


def test_split_backward() -> None:
    assert grid("zb-h1", 3, 4) == lines(
        "rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    )


def test_the_second_chunk_is_in_small_letters() -> None:
    assert grid("interleaved", 2, 4, num_chunks=2) == lines(
        "rank 0  F0 F1 f0 f1 F2 .. b0 -- F3 b1 -- f2 B0 -- f3 B1 -- .. b2 -- .. b3 -- B2 -- B3 --",
        "rank 1  .. F0 F1 f0 b0 -- f1 b1 -- F2 B0 -- F3 B1 -- f2 b2 -- f3 b3 -- B2 -- B3 -- .. ..",
    )


def test_of_more_chunks_the_stage_stands_in_front() -> None:
    assert grid("interleaved", 2, 2, num_chunks=3) == lines(
        "rank 0  0F0 0F1 2F0 2F1 4F0 4F1 ..  ..  4B0 --  ..  4B1 --  2B0 --  2B1 --  0B0 --  0B1 --",
        "rank 1  ..  1F0 1F1 3F0 3F1 5F0 5B0 --  5F1 5B1 --  3B0 --  3B1 --  1B0 --  1B1 --  ..  ..",
    )


def test_a_fused_pair_spreads_over_its_ticks_and_the_second_direction_is_in_small_letters() -> None:
    # Microbatches 0 and 2 go down the ranks, 1 and 3 go up.
    both_ways = (
        "0F0,1F1,(0F2;1B1)OVERLAP_F_B,(1F3;0B0)OVERLAP_F_B,1B3,0B2\n"
        "0F1,1F0,(0F3;1B0)OVERLAP_F_B,(1F2;0B1)OVERLAP_F_B,1B2,0B3\n"
    )
    assert of_tokens(both_ways) == lines(
        "rank 0  F0 f1 F2&b1 -- f3&B0 -- b3 -- B2 --",
        "rank 1  f1 F0 f3&B0 -- F2&b1 -- B2 -- b3 --",
    )
    assert of_tokens(both_ways, Costs(overlapped=1)) == lines(
        "rank 0  F0    f1    F2&b1 f3&B0 b3    --    B2    --",
        "rank 1  f1    F0    f3&B0 F2&b1 B2    --    b3    --",
    )


def test_wide_numbers_widen_every_column_alike() -> None:
    assert grid("1f1b", 2, 11) == lines(
        "rank 0  F0  F1  ..  ..  B0  --  F2  B1  --  F3  B2  --  F4  B3  --  F5  B4  --  F6  B5  --  F7  B6  --  F8  "
        "B7  --  F9  B8  --  F10 B9  --  ..  B10 --",
        "rank 1  ..  F0  B0  --  F1  B1  --  F2  B2  --  F3  B3  --  F4  B4  --  F5  B5  --  F6  B6  --  F7  B7  --  "
        "F8  B8  --  F9  B9  --  F10 B10 --  ..  ..",
    )


def test_ranks_of_two_digits_stand_in_line() -> None:
    rows = grid("1f1b", 16, 32).splitlines()
    assert rows[0].startswith("rank  0  F0  F1  F2 ")
    assert rows[15].startswith("rank 15  ..  ..  .. ")
    assert {len(row) for row in rows} <= {len(rows[0]), len(rows[0]) - 1}  # the last column ends in -- or in ..


def test_a_tick_shorter_than_every_instruction() -> None:
    assert grid("1f1b", 2, 2, Costs(forward=1, backward=2, send=0.5)) == lines(
        "rank 0  F0 -- F1 -- .. .. .. .. .. .. B0 -- -- -- .. .. B1 -- -- --",
        "rank 1  .. .. .. F0 -- B0 -- -- -- F1 -- B1 -- -- -- .. .. .. .. ..",
    )


def test_times_without_a_common_tick_are_drawn_to_scale() -> None:
    assert grid("1f1b", 2, 3, Costs(forward=1, input_gradient=1.3, weight_gradient=0.7, send=0.1)) == lines(
        "rank 0  F0 F1 ...... B0--- F2 B1--- .. B2---",
        "rank 1  .. F0 B0--- F1 B1---  F2 B2--- .....",
    )


def test_of_cells_too_short_for_their_label_the_letter_remains() -> None:
    assert grid("zb-h1", 2, 2, Costs(weight_gradient=0.1)) == lines(
        "rank 0  F0--------- F1--------- ........... I0--------- W.......... I1--------- W",
        "rank 1  ........... F0--------- I0--------- F1--------- I1--------- WW..........",
    )


def test_what_takes_no_time_has_no_column() -> None:
    assert grid("zb-h1", 2, 3, Costs(weight_gradient=0)) == lines(
        "rank 0  F0 F1 .. I0 F2 I1 .. I2",
        "rank 1  .. F0 I0 F1 I1 F2 I2 ..",
    )


def test_a_program_that_takes_no_time_has_no_columns() -> None:
    assert grid("gpipe", 2, 2, Costs(forward=0, backward=0)) == lines("rank 0", "rank 1")


def test_a_step_between_computations_is_a_bar_and_one_that_takes_time_a_cell() -> None:
    schedule = create("1f1b", num_ranks=2, num_microbatches=2)
    assert grid_text(simulate(schedule.program(steps=2))) == lines(
        "rank 0  F0 F1 .. .. B0 -- .. B1 --|F2 F3 .. .. B2 -- .. B3 --",
        "rank 1  .. F0 B0 -- F1 B1 --|.. .. .. F2 B2 -- F3 B3 -- .. ..",
    )
    assert grid("1f1b", 2, 2, Costs(step=1)) == lines(
        "rank 0  F0 F1 .. .. B0 -- .. B1 -- S1",
        "rank 1  .. F0 B0 -- F1 B1 -- S1 .. ..",
    )


def test_weight_versions_are_added_on_request() -> None:
    timeline = simulate(create("2bw", num_ranks=2, num_microbatches=2).program(steps=3))
    assert grid_text(timeline, versions=True) == lines(
        "rank 0  F0@0 F1@0 ..   ..   B0@0 --   F2@0 B1@0 --  |F3@0 B2@0 --   F4@1 B3@0 --  |F5@1 B4@1 --   .."
        "   B5@1 --",
        "rank 1  ..   F0@0 B0@0 --   F1@0 B1@0 --  |F2@0 B2@0 --   F3@0 B3@0 --  |F4@1 B4@1 --   F5@1 B5@1 --"
        "   ..   ..",
    )
    assert "@" not in grid_text(timeline)


@pytest.mark.parametrize("origin", [0.0, 1234.5])
def test_a_measured_timeline_starts_at_its_own_first_start(origin: float) -> None:
    timeline = simulate(create("gpipe", num_ranks=2, num_microbatches=2).program())
    moved = type(timeline)(
        timeline.program,
        timeline.costs,
        tuple(time + origin for time in timeline.starts),
        tuple(time + origin for time in timeline.ends),
    )
    assert grid_text(moved) == grid_text(timeline)
