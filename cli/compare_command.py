"""`stagewright compare`: all schedules on one shape, in one table."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Final, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from stagewright.cli.compare import Figures, Refusal, compare
from stagewright.cli.costs import add_costs
from stagewright.cli.size import check_size
from stagewright.schedules import Costs, Formula, ScheduleError
from stagewright.schedules.arguments import import_schedules, read_options
from stagewright.schedules.schedule import check_count

EXAMPLES = """\
examples:
  stagewright compare --ranks 8 --microbatches 32
  stagewright compare --ranks 8 --microbatches 32 --costs F=1,I=1.3,W=0.7,send=0.05
  stagewright compare --ranks 8 --microbatches 32 --chunks 4 --memory-cap 8
  stagewright compare --ranks 3 --microbatches 12 --schedule-option replicas=2,1

The costs are those of a whole rank's share of the model for one microbatch; a chunk costs its share of that, so that
schedules with different numbers of chunks can be compared.
"""

# Two lines of heading, and the side of the column that its cells keep to.
COLUMNS: Final[Sequence[tuple[str, str, Literal["left", "right"]]]] = (
    ("", "schedule", "left"),
    ("", "V", "left"),
    ("", "idle by formula", "left"),
    ("", "of", "left"),
    ("", "bubble", "left"),
    ("simulated", "makespan", "right"),
    ("bubble of", "span", "right"),
    ("", "steady", "right"),
    ("time per", "batch", "right"),
    ("", "stash", "right"),
    ("", "weights", "left"),
    ("", "sends", "left"),
    ("", "updates", "left"),
)
# What a narrow terminal does without, first to last.
DISPENSABLE: Final = ("idle by formula", "sends", "of", "updates", "bubble", "V", "weights", "bubble of span", "steady")

# What the table is sorted by, and how to read it.
LEGEND = (
    "Sorted by time per batch, as a trainer really gets it that clips by the global gradient norm or watches for "
    "overflow: all ranks then wait for each other before they step, so a synchronous schedule takes its makespan; an "
    "asynchronous one computes on with older weights meanwhile and takes its steady period. Bold: the bubble of that.",
    "Bubbles are idle / (idle + busy). Makespan: from the first start on any rank to the last end on any. Span: one "
    "rank's own time from its first computation to its last, the rate that zero-bubble papers print; one gets it only "
    "where the optimizer step waits for nobody. Steady: the time per batch when batches follow each other and ranks "
    "wait for data alone.",
    "Formulas are of idle time, for equal stages and sends that take no time, with F I W B of a whole rank's share of "
    "the model; = where the simulation says the same, ≠ where it does not.",
    "Stash: the most microbatches that a rank holds, in whole shares of the model. Sends: messages per microbatch.",
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `compare` command."""
    parser = subparsers.add_parser(
        "compare",
        help="compare all schedules on one shape",
        description="Simulate every schedule on one shape and tabulate bubbles, memory and communication.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=8, metavar="P", help="ranks of the pipeline (default 8)")
    parser.add_argument(
        "--microbatches", type=int, metavar="M", help="microbatches of one batch (default four times the ranks)"
    )
    parser.add_argument(
        "--chunks", type=int, metavar="V", help="stages that each rank owns, for schedules that let one choose"
    )
    add_costs(parser)
    parser.add_argument(
        "--memory-cap",
        type=float,
        metavar="BYTES",
        help="the most that a rank may stash, in the unit of activation_bytes and weight_bytes; "
        "by default a microbatch of a rank's share of the model counts 1",
    )
    parser.add_argument(
        "--schedule-module", metavar="MODULE", help="import this module first, for the schedules it registers"
    )
    parser.add_argument(
        "--schedule-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option for the schedules that have it, such as replicas=2,1 (may be repeated)",
    )


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Print the table; exit code 2 where the input is wrong."""
    num_ranks = arguments.ranks
    num_microbatches = 4 * num_ranks if arguments.microbatches is None else arguments.microbatches
    try:
        check_count("--ranks", num_ranks)
        check_count("--microbatches", num_microbatches)
        if arguments.chunks is not None:
            check_count("--chunks", arguments.chunks)
        if arguments.memory_cap is not None and not arguments.memory_cap > 0:
            raise ScheduleError(f"--memory-cap is above zero: got {arguments.memory_cap:g}")
        check_size(num_ranks, num_microbatches, arguments.chunks or 1)
        import_schedules(arguments.schedule_module)
        options = read_options(arguments.schedule_option)
        if arguments.memory_cap is not None and "memory_cap" in options:
            raise ScheduleError("--memory-cap says it already: leave out --schedule-option memory_cap")
        figures, refused = compare(
            num_ranks, num_microbatches, arguments.chunks, arguments.costs, arguments.memory_cap, options
        )
    except ScheduleError as error:
        sys.stderr.write(f"stagewright compare: {error}\n")
        return 2
    report(
        console or Console(), f"{num_ranks} ranks, {num_microbatches} microbatches", arguments.costs, figures, refused
    )
    return 0


def report(console: Console, shape: str, costs: Costs, figures: Sequence[Figures], refused: Sequence[Refusal]) -> None:
    """Print the table, how to read it, and what is not in it."""
    console.print(f"{shape}; a rank's share of the model costs {describe(costs)}", style="bold", soft_wrap=True)
    left_out = print_table(console, figures)
    for line in LEGEND:
        console.print(line, style="dim", highlight=False)
    if left_out:
        console.print(
            f"For want of width there is no {', '.join(left_out)}: pipe this, or widen the window.", style="dim"
        )
    for schedule in (row.schedule for row in figures if not row.schedule.runnable):
        console.print(f"* The engine does not run {schedule.name}: {schedule.refusal}", style="dim", highlight=False)
    if refused:
        console.print("\nNot on this shape:", style="bold")
        console.print(refusals_of(refused))


def print_table(console: Console, figures: Sequence[Figures]) -> list[str]:
    """Print as many columns as a terminal has room for, all to a pipe; return which were left out."""
    left_out: list[str] = []
    table, width = table_of(figures, left_out), console.width
    while console.is_terminal and _width_of(table, console) > width and len(left_out) < len(DISPENSABLE):
        left_out.append(DISPENSABLE[len(left_out)])
        table = table_of(figures, left_out)
    # A table that is folded cannot be read; one that is wider than the window can be.
    console.width = max(width, _width_of(table, console))
    console.print(table)
    console.width = width
    return left_out


def _width_of(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=1000), table).maximum


def describe(costs: Costs) -> str:
    """The costs as given, defaults left out but for the computations'."""
    parts = [f"{name}={_number(value)}" for name, value in _computations(costs).items()]
    for field in fields(Costs):
        value = getattr(costs, field.name)
        if field.name not in ("forward", "backward", "input_gradient", "weight_gradient") and value != field.default:
            parts.append(f"{field.name}={_number(value)}")
    return " ".join(parts)


def _computations(costs: Costs) -> dict[str, float | Sequence[float]]:
    """F, B, I and W; what was left out is worked out, unless costs differ from stage to stage."""
    given = {"F": costs.forward, "B": costs.backward, "I": costs.input_gradient, "W": costs.weight_gradient}
    if any(isinstance(value, Sequence) for value in given.values()):
        return {name: value for name, value in given.items() if value is not None}
    stage = replace(costs, recompute=0.0, overlapped=None).of_stages(1)
    return {
        "F": stage.forward[0],
        "B": stage.backward[0],
        "I": stage.input_gradient[0],
        "W": stage.weight_gradient[0],
    }


def _number(value: float | Sequence[float]) -> str:
    return ":".join(f"{number:g}" for number in value) if isinstance(value, Sequence) else f"{value:g}"


def table_of(rows: Sequence[Figures], left_out: Sequence[str] = ()) -> Table:
    """One line a schedule."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    kept = [index for index, (above, below, _) in enumerate(COLUMNS) if f"{above} {below}".strip() not in left_out]
    for index in kept:
        above, below, justify = COLUMNS[index]
        table.add_column(f"{above}\n{below}", no_wrap=True, justify=justify)
    for row in rows:
        cells = _cells(row)
        table.add_row(*(cells[index] for index in kept))
    return table


def _cells(row: Figures) -> list[str | Text]:
    schedule, formula = row.schedule, row.formula
    counts = "makespan" if schedule.synchronous else "steady"
    bubbles = {"makespan": row.makespan_bubble, "span": row.span_bubble, "steady": row.steady_bubble}
    return [
        schedule.name if schedule.runnable else f"{schedule.name} *",
        str(schedule.placement.num_chunks),
        *(("", "", "") if formula is None else (formula.text, formula.measure, _marked(formula, row.formula_holds))),
        *(Text(f"{bubble:.1%}", style="bold" if kind == counts else "") for kind, bubble in bubbles.items()),
        Text(f"{row.time:.6g}", style="bold"),
        f"{row.peak_stash:g}",
        _weights(row),
        f"{row.sends:g}",
        "sync" if schedule.synchronous else "async",
    ]


def _marked(formula: Formula, holds: bool) -> Text:
    return Text(f"{formula.fraction:6.1%} {'=' if holds else '≠'}", style="" if holds else "red")


def _weights(row: Figures) -> str:
    """How often a rank keeps its share of the model."""
    if row.num_versions > 1:
        return f"{row.num_versions} versions"
    return f"{row.num_copies} copies" if row.num_copies > 1 else "1"


def refusals_of(refused: Sequence[Refusal]) -> Table:
    """One schedule a line, with its reason."""
    table = Table.grid(padding=(0, 2))
    for refusal in refused:
        table.add_row(refusal.name, refusal.reason)
    return table
