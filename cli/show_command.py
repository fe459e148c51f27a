"""`stagewright show`: one schedule as text, as a picture, or as data for other programs."""

import argparse
import io
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Final

from rich.console import Console

from stagewright.cli.costs import add_costs
from stagewright.cli.output import format_of, write
from stagewright.cli.show import show_schedule
from stagewright.cli.size import check_size
from stagewright.cli.verify_command import flags_for
from stagewright.schedules import (
    Program,
    Schedule,
    ScheduleError,
    Timeline,
    add_arguments,
    find,
    from_arguments,
    simulate,
)
from stagewright.schedules.arguments import import_schedules
from stagewright.schedules.drawing import PALETTES, html_text, json_text, svg_text, trace_text
from stagewright.schedules.drawing.palettes import palette_of

FORMATS: Final = ("text", "svg", "html", "csv", "json", "trace")
DEFAULT: Final = "1f1b"
# Batches of an asynchronous schedule: the pipeline fills, is full, and drains.
STEPS_OF_ASYNCHRONOUS: Final = 3

EXAMPLES: Final = """\
examples:
  stagewright show 1f1b --ranks 4 --microbatches 8
  stagewright show zb-h1 --ranks 4 --microbatches 8 --costs F=1,I=1.3,W=0.7,send=0.05
  stagewright show dualpipe --ranks 8 --microbatches 20 --palette deepseek -o dualpipe.svg
  stagewright show 2bw --ranks 4 --microbatches 8 -o 2bw.html         to zoom, with the memory of every rank
  stagewright show interleaved --ranks 4 --microbatches 8 --chunks 2 --format trace -o trace.json    for Perfetto

In text, one line is one rank. F3 is the forward of microbatch 3, B3 its backward, I3 and W3 its input and weight
gradient; `--` goes on with the instruction to its left, `..` is idle, `|` is an optimizer step.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `show` command."""
    parser = subparsers.add_parser(
        "show",
        help="draw a schedule, with its bubble and memory",
        description="Simulate a schedule and draw it: who computes what, and when.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="SCHEDULE", help="as named by `stagewright list`")
    add_arguments(parser, schedule=DEFAULT, num_ranks=4)
    parser.set_defaults(schedule=None)
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"batches, one after the other (default 1, of an asynchronous schedule {STEPS_OF_ASYNCHRONOUS})",
    )
    add_costs(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--format",
        choices=FORMATS,
        help="text (the default), svg, html (zoom, reasons, memory), csv (torch's), json, or trace (Perfetto, "
        "chrome://tracing); told by the end of FILE where left out",
    )
    output.add_argument("-o", "--output", type=Path, metavar="FILE", help="write to this file, not to the terminal")
    output.add_argument(
        "--palette", choices=tuple(PALETTES), default="megatron", help="house style of the colours (default megatron)"
    )


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Draw the schedule that the flags select; exit code 2 where the input is wrong."""
    try:
        schedule = _schedule(arguments)
        steps = 1 if schedule.synchronous else STEPS_OF_ASYNCHRONOUS
        program = schedule.program(steps if arguments.steps is None else arguments.steps)
        timeline = simulate(program, arguments.costs)
        form = arguments.format or format_of(arguments.output, FORMATS)
        if arguments.output is not None:
            write(arguments.output, drawn(form, schedule, timeline, arguments.palette))
        elif form == "text":
            show_schedule(console or Console(), schedule, timeline, palette_of(arguments.palette))
        else:
            _print(drawn(form, schedule, timeline, arguments.palette))
        if form == "csv":
            _tell_how_to_prove(program, arguments.output)
    except ScheduleError as error:
        sys.stderr.write(f"stagewright show: {error}\n")
        return 2
    return 0


def drawn(form: str, schedule: Schedule, timeline: Timeline, palette: str) -> str:
    """One of the formats as a string."""
    title = f"{schedule.name}: {schedule.summary}"
    match form:
        case "svg":
            return svg_text(timeline, title=title, palette=palette)
        case "html":
            return html_text(timeline, title=title, palette=palette)
        case "csv":
            return timeline.program.to_csv()
        case "json":
            return json_text(timeline, title=title)
        case "trace":
            return trace_text(timeline, title=title)
        case _:
            file = io.StringIO()
            show_schedule(Console(file=file, color_system=None), schedule, timeline, palette_of(palette))
            return file.getvalue()


def _schedule(arguments: argparse.Namespace) -> Schedule:
    """The schedule that the flags select, planned for their costs if it is one that plans."""
    import_schedules(arguments.schedule_module)
    if arguments.name is not None and arguments.schedule is not None:
        raise ScheduleError(f"show draws one schedule: got {arguments.name} and --schedule {arguments.schedule}")
    arguments.schedule = arguments.name or arguments.schedule or DEFAULT
    check_size(arguments.ranks, arguments.microbatches or 2 * arguments.ranks, arguments.chunks or 1)
    plans = any(field.name == "costs" for field in fields(find(arguments.schedule)))
    return from_arguments(arguments, **({"costs": arguments.costs} if plans else {}))


def _tell_how_to_prove(program: Program, file: Path | None) -> None:
    """A file says nothing of the rule by which weights are updated; where it is not the usual one, say what does."""
    flags = flags_for(program)
    if flags:
        name = "-" if file is None else shlex.quote(str(file))
        sys.stderr.write(f"to prove it: stagewright verify {name} {' '.join(flags)}\n")


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
