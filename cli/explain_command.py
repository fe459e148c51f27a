"""`stagewright explain`: why a measured step took as long as it did."""

import argparse
import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console

from stagewright.cli.explain import show_explanation
from stagewright.cli.output import format_of, write
from stagewright.cli.values import count
from stagewright.schedules import ScheduleError, Timeline
from stagewright.schedules.drawing import PALETTES, json_text, trace_text
from stagewright.schedules.drawing.overlay import overlay_html, overlay_svg
from stagewright.schedules.explanation import Explanation, explain
from stagewright.schedules.recording import MAX_BYTES, Recording

FORMATS: Final = ("text", "svg", "html", "json", "trace")
EXIT_WRONG_INPUT: Final = 2

EXAMPLES: Final = """\
examples:
  stagewright train --schedule zbv --ranks 2 --trace step.json       train, and record the last steps
  stagewright explain step.json                                      where each rank's time went
  stagewright explain step.json -o step.html                         predicted and measured over each other, to zoom
  stagewright explain step.json --format trace -o step.trace.json    what was measured, for Perfetto
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `explain` command."""
    parser = subparsers.add_parser(
        "explain",
        help="say why a recorded step took as long as it did",
        description="Hold a recorded step against its prediction: where each rank's time went, and what cost most.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="as `stagewright train --trace FILE` writes it")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="the N-th recorded step, from 1, or from the end with -1 (default the one of median length)",
    )
    parser.add_argument("--top", type=count, default=10, metavar="N", help="instructions that are named (default 10)")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--format",
        choices=FORMATS,
        help="text (the default); svg or html: predicted and measured over each other; json or trace (Perfetto, "
        "chrome://tracing): what was measured; told by the end of FILE where left out",
    )
    output.add_argument("-o", "--output", type=Path, metavar="FILE", help="write to this file, not to the terminal")
    output.add_argument(
        "--palette", choices=tuple(PALETTES), default="megatron", help="house style of the colours (default megatron)"
    )


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Explain a step of a file; exit code 2 where the input is wrong."""
    try:
        recording = read(arguments.file)
        measured = step_of(recording, arguments.step)
        explanation = explain(measured, recording.costs)
        title = f"{recording.schedule}: a step of {arguments.file.name}"
        form = arguments.format or format_of(arguments.output, FORMATS)
        if arguments.output is not None:
            write(arguments.output, drawn(form, explanation, title, arguments))
        elif form == "text":
            show_explanation(console or Console(), explanation, title, arguments.top)
        else:
            sys.stdout.write(drawn(form, explanation, title, arguments))
    except ValueError as error:
        sys.stderr.write(f"stagewright explain: {error}\n")
        return EXIT_WRONG_INPUT
    return 0


def read(file: Path) -> Recording:
    """The recording in a file.

    Raises:
        ValueError: it cannot be read, is too large, or no recording.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ValueError(f"{file} has more than {MAX_BYTES} bytes: too large for a recording")
    try:
        return Recording.from_json(data.decode("utf-8"))
    except ValueError as error:
        kind = ScheduleError if isinstance(error, ScheduleError) else ValueError
        raise kind(f"{file}: {error}") from error


def step_of(recording: Recording, number: int | None) -> Timeline:
    """A recorded step by its number.

    Raises:
        ScheduleError: there is no such step.
    """
    if number is None:
        return recording.typical
    count = len(recording.steps)
    if not 1 <= abs(number) <= count:
        raise ScheduleError(f"there is no step {number}: {count} are recorded; use 1 to {count}, or -1 for the last")
    return recording.steps[number - 1 if number > 0 else number]


def drawn(form: str, explanation: Explanation, title: str, arguments: argparse.Namespace) -> str:
    """One of the formats as a string; times in milliseconds."""
    predicted, measured = in_milliseconds(explanation.predicted), in_milliseconds(explanation.measured)
    match form:
        case "svg":
            return overlay_svg(predicted, measured, title=title, palette=arguments.palette)
        case "html":
            return overlay_html(predicted, measured, title=title, palette=arguments.palette)
        case "json":
            return json_text(measured, title=title)
        case "trace":
            return trace_text(measured, title=title)
        case _:
            file = io.StringIO()
            show_explanation(Console(file=file, color_system=None, width=100), explanation, title, arguments.top)
            return file.getvalue()


def in_milliseconds(timeline: Timeline) -> Timeline:
    """A timeline in seconds with a unit that people read more easily."""
    starts, ends = (tuple(1e3 * time for time in times) for times in (timeline.starts, timeline.ends))
    return replace(timeline, starts=starts, ends=ends)
