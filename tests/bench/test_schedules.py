"""The bench of schedules: what it measures and prints, at small shapes; no time is asserted."""

import pytest

from stagewright.bench import schedules
from stagewright.bench.__main__ import main
from stagewright.bench.schedules import Measurement, growth, measure
from stagewright.bench.torch_schedules import TORCH_NAMES, build_and_lower
from stagewright.schedules import ScheduleError, create, names


def test_growth_is_the_power_of_the_number_of_instructions() -> None:
    squares = [Measurement(ranks, size, 1e-6 * size**2) for ranks, size in ((2, 10), (4, 300), (8, 5000))]
    assert growth(squares) == pytest.approx(2)


def test_a_measurement_counts_the_instructions_of_the_program() -> None:
    measurements = measure("interleaved", [2, 4], 2)
    for measurement, num_ranks in zip(measurements, (2, 4)):
        program = create("interleaved", num_ranks=num_ranks, num_microbatches=4 * num_ranks, num_chunks=2).program()
        assert measurement.num_ranks == num_ranks
        assert measurement.num_instructions == sum(map(len, program.streams))
        assert measurement.torch_seconds is None


@pytest.mark.parametrize("name", [name for name in TORCH_NAMES if name in names()])
def test_torch_does_the_same_work(name: str) -> None:
    """It sends, receives and computes as often as ours; beside that it has actions for sharding, and we have steps."""
    ours = create(name, num_ranks=4, num_microbatches=16).program()
    num_steps = 8
    num_for_sharding = 8 * len(("UNSHARD", "RESHARD", "REDUCE_GRAD"))
    assert build_and_lower(name, 4, 2, 16) - num_for_sharding == sum(map(len, ours.streams)) - num_steps


def test_shapes_that_torch_would_take_too_long_for_are_left_out() -> None:
    assert [row.torch_seconds is None for row in measure("bfs", [2, 3], 2, torch_limit=1e9)] == [False, False]
    assert [row.torch_seconds is None for row in measure("bfs", [2, 3], 2, torch_limit=0.0)] == [True, True]
    assert [row.torch_seconds is None for row in measure("gpipe", [2, 3], 2, torch_limit=1e9)] == [True, True]


def test_a_shape_that_is_not_served_is_refused() -> None:
    with pytest.raises(ScheduleError, match="even number of ranks"):
        measure("dualpipe", [3], 2)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert schedules.main(["1f1b", "dualpipe", "--ranks", "2", "3"]) == 1
    text = capsys.readouterr().out
    assert "create + verify + simulate, CPU seconds; M = 4P" in text
    assert any(line.strip().startswith("1f1b") for line in text.splitlines())
    assert "dualpipe: dualpipe needs an even number of ranks" in text


def test_an_unknown_bench_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["no-such-bench"])
    assert "there is no bench 'no-such-bench': there are bubble" in capsys.readouterr().err
