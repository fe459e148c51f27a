"""`stagewright compare`: the figures of all schedules on one shape, and their table."""

import argparse
import io

import pytest
from rich.console import Console

from stagewright.cli import compare_command
from stagewright.cli.compare import Figures, Refusal, compare, create_for, share_of
from stagewright.schedules import Costs, create, names, simulate


def figures(costs: Costs | None = None, **options: float) -> tuple[dict[str, Figures], list[Refusal]]:
    """By name, at P=4 and M=8 (so that 24 is a rank's work where F=I=W=1)."""
    found, refused = compare(4, 8, options.pop("num_chunks", None), costs or Costs(), **options)
    return {row.schedule.name: row for row in found}, refused


def output(*arguments: str) -> tuple[int, str]:
    """Exit code and text of the command."""
    parser = argparse.ArgumentParser()
    compare_command.add_parser(parser.add_subparsers())
    console = Console(file=io.StringIO(), width=80)
    code = compare_command.run(parser.parse_args(["compare", *arguments]), console)
    return code, console.file.getvalue()


class TestFigures:
    def test_every_schedule_is_compared_or_refused(self) -> None:
        found, refused = compare(3, 5, None, Costs())
        assert sorted([row.schedule.name for row in found] + [refusal.name for refusal in refused]) == sorted(names())
        assert {"gpipe", "1f1b", "2bw"} <= {row.schedule.name for row in found}

    def test_1f1b(self) -> None:
        row = figures()[0]["1f1b"]
        assert row.makespan_bubble == row.span_bubble == row.steady_bubble == pytest.approx(9 / 33)
        assert (row.time, row.peak_stash, row.peak_bytes, row.num_versions, row.num_copies) == (33, 4, 4, 1, 1)
        assert row.sends == 2 * 3
        assert row.formula_holds

    def test_a_barrier_takes_the_zero_bubble_away(self) -> None:
        row = figures()[0]["zb-h2"]
        assert row.makespan_bubble == pytest.approx(3 / 27)
        assert (row.span_bubble, row.steady_bubble, row.time) == (0, 0, 27)

    def test_an_asynchronous_schedule_takes_its_steady_period(self) -> None:
        row = figures()[0]["2bw"]
        assert row.makespan_bubble == pytest.approx(9 / 33)
        assert (row.steady_bubble, row.time, row.num_versions) == (0, 24, 2)
        assert row.formula_holds

    @pytest.mark.parametrize("num_chunks", [None, 1, 4])
    def test_every_schedule_does_the_same_work_whatever_its_chunks(self, num_chunks: int | None) -> None:
        costs = Costs(forward=1, input_gradient=1.25, weight_gradient=0.75)
        for row in figures(costs, num_chunks=num_chunks)[0].values():
            if row.schedule.name == "none":
                continue  # its ranks take turns
            timeline = simulate(row.schedule.program(), costs.scaled(share_of(row.schedule)))
            assert timeline.busy == pytest.approx([24] * 4)
            assert row.peak_bytes == pytest.approx(row.peak_stash)

    def test_more_chunks_shrink_the_bubble_and_multiply_the_sends(self) -> None:
        two, four = (figures(num_chunks=count)[0]["interleaved"] for count in (2, 4))
        assert two.time - 24 == 9 / 2
        assert four.time - 24 == 9 / 4
        assert (two.sends, four.sends) == (2 * 7, 2 * 15)

    def test_the_fastest_comes_first_and_of_equals_the_smallest(self) -> None:
        found, _ = compare(4, 8, None, Costs())
        assert found == sorted(found, key=lambda row: (row.time, row.peak_bytes))
        assert [row.schedule.name for row in found][-3:] == ["1f1b", "gpipe", "none"]

    def test_schedules_over_the_memory_cap_are_left_out_with_their_need(self) -> None:
        found, refused = figures(memory_cap=4)
        assert "1f1b" in found
        assert "gpipe" not in found
        assert Refusal("gpipe", "stashes 8, more than the cap of 4") in refused
        assert all(row.peak_bytes <= 4 for row in found.values())

    def test_options_reach_the_schedules_that_take_them(self) -> None:
        schedule, of_stage = create_for("interleaved", 4, 8, 4, Costs())
        assert schedule == create("interleaved", num_ranks=4, num_microbatches=8, num_chunks=4)
        assert of_stage.of_stages(16).forward == (0.25,) * 16
        assert create_for("1f1b", 4, 8, 4, Costs())[0].placement.num_chunks == 1


def line_of(text: str, name: str) -> str:
    """A schedule's line, with single spaces."""
    return next(" ".join(line.split()) for line in text.splitlines() if line.strip().startswith(f"{name} "))


class TestTable:
    def test_formula_and_simulation_stand_side_by_side(self) -> None:
        code, text = output("--ranks", "4", "--microbatches", "8")
        assert code == 0
        assert line_of(text, "1f1b") == "1f1b 1 (P-1)(F+B) makespan 27.3% = 27.3% 27.3% 27.3% 33 4 1 6 sync"
        assert line_of(text, "zb-h2") == "zb-h2 1 (P-1)(F+I-2W) span 0.0% = 11.1% 0.0% 0.0% 27 7 1 6 sync"
        assert line_of(text, "2bw") == "2bw 1 0 steady 0.0% = 27.3% 27.3% 0.0% 24 4 2 versions 6 async"

    def test_where_they_disagree_it_is_marked(self) -> None:
        """The formula knows nothing of sends."""
        _, text = output("--ranks", "4", "--microbatches", "8", "--costs", "F=1,B=2,send=0.5")
        assert "27.3% ≠ 41.5%" in line_of(text, "1f1b")
        assert "F=1 B=2 I=1 W=1 send=0.5" in text

    def test_no_cell_is_cut_short_on_a_narrow_terminal(self) -> None:
        _, text = output("--ranks", "4", "--microbatches", "8")
        assert "…" not in text

    def test_what_is_refused_says_why(self) -> None:
        _, text = output("--ranks", "4", "--microbatches", "2")
        assert "Not on this shape:" in text
        assert "microbatches" in line_of(text, "2bw")

    def test_the_caption_says_what_it_is_sorted_by(self) -> None:
        _, text = output("--ranks", "2", "--microbatches", "2")
        assert "Sorted by time per batch, as a trainer really gets it" in text

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--ranks", "0"], "--ranks is a whole number from 1 up: got 0"),
            (["--microbatches", "0"], "--microbatches is a whole number from 1 up: got 0"),
            (["--memory-cap", "-1"], "--memory-cap is above zero: got -1"),
            (["--schedule-module", "no_such_module"], "--schedule-module no_such_module"),
            (
                ["--schedule-option", "waves=2"],
                "no schedule has an option 'waves': some have deep_warmup, group_size, ",
            ),
            (
                ["--schedule-option", "replicas"],
                "an option of a schedule is written NAME=VALUE, such as num_waves=2: got",
            ),
            (["--schedule-option", "num_chunks=2"], "--schedule-option num_chunks=2: num_chunks has a flag of its own"),
            (["--memory-cap", "4", "--schedule-option", "memory_cap=4"], "--memory-cap says it already: leave out"),
        ],
    )
    def test_wrong_input_is_refused_in_one_line(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert output(*arguments) == (2, "")
        error = capsys.readouterr().err
        assert error.startswith(f"stagewright compare: {message}")
        assert error.count("\n") == 1


def test_options_are_for_the_schedules_that_have_them() -> None:
    """Replicas cost as much as the ranks' shares of the model that they compute."""
    plain, replicated = (
        {row.schedule.name: row for row in compare(3, 12, None, Costs(), options=options)[0]}
        for options in ({}, {"replicas": (2, 1)})
    )
    for name in ("1f1b", "2bw", "pipedream"):
        row = replicated[name]
        assert (row.schedule.num_stages, row.num_copies) == (2, 2)
        assert sum(simulate(row.schedule.program(), Costs().scaled(share_of(row.schedule))).busy) == pytest.approx(108)
        assert plain[name].schedule.num_stages == 3
    assert {name: row.time for name, row in plain.items()} == {
        name: plain[name].time if name in ("1f1b", "2bw", "pipedream") else row.time for name, row in replicated.items()
    }


def test_an_option_that_does_not_fit_is_a_reason_not_to_be_compared() -> None:
    _, text = output("--ranks", "3", "--microbatches", "12", "--schedule-option", "replicas=2,2")
    for name in ("1f1b", "2bw", "pipedream"):
        assert "replicas 2-2 are 4 ranks" in line_of(text[text.index("Not on this shape:") :], name)
    _, text = output("--ranks", "3", "--microbatches", "12", "--schedule-option", "num_waves=x")
    assert "Not on this shape:" in text
    assert "hanayo" in text[text.index("Not on this shape:") :]


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_narrow_terminal_gets_the_columns_that_fit(width: int) -> None:
    """And is told which do not; a pipe gets them all."""
    rows, _ = compare(4, 8, None, Costs())
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    left_out = compare_command.print_table(console, rows)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert left_out == list(compare_command.DISPENSABLE[: len(left_out)])
    assert all(any(line.startswith(f" {name} ") for line in lines) for name in ("1f1b", "2bw", "zbv"))
    piped = Console(file=io.StringIO(), width=width)
    assert compare_command.print_table(piped, rows) == []
