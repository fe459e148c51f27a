"""The `stagewright` command."""

import argparse
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from stagewright.cli import compare_command, show_command, verify_command
from stagewright.cli.arguments import build_parser, train_settings
from stagewright.cli.report import MetricsError
from stagewright.cli.show import list_schedules
from stagewright.cli.torchrun import is_first_rank
from stagewright.schedules import ScheduleError
from stagewright.schedules.arguments import import_schedules

EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 2 where the input is wrong, 130 where it was interrupted."""
    parsed = build_parser().parse_args(arguments)
    if getattr(parsed, "schedule_module", None) is not None:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; an installed script does not look there
    try:
        match parsed.command:
            case "list":
                return run_list(parsed)
            case "show":
                return show_command.run(parsed)
            case "compare":
                return compare_command.run(parsed)
            case "verify":
                return verify_command.run(parsed)
            case _:
                return run_train(parsed)
    except KeyboardInterrupt:
        # A terminal shows ^C, and maybe half a progress bar, on the line where the cursor stands.
        sys.stderr.write("\ninterrupted\n" if sys.stderr.isatty() else "interrupted\n")
        return EXIT_INTERRUPTED


def run_list(parsed: argparse.Namespace) -> int:
    """Name the schedules."""
    try:
        import_schedules(parsed.schedule_module)
    except ScheduleError as error:
        return complain("list", error)
    list_schedules(Console())
    return 0


def run_train(parsed: argparse.Namespace) -> int:
    """Check what was asked for, then train.

    The errors of the check are the user's, and so is a schedule that the engine turns out unable to run; all else that
    goes wrong later keeps its traceback.
    """
    try:
        settings = train_settings(parsed)
        from stagewright.cli import train_command  # late, because torch takes seconds to import

        corpus = train_command.check(settings)
    except ValueError as error:
        return complain("train", error)
    try:
        train_command.run(settings, corpus, Console())
    except ScheduleError as error:
        return complain("train", error)
    except MetricsError as error:
        return complain("train", error, all_ranks=False)
    return 0


def complain(command: str, error: ValueError, *, all_ranks: bool = True) -> int:
    """Say what is wrong with the input; where all ranks have the same to say, one says it for all."""
    if is_first_rank() or not all_ranks:
        sys.stderr.write(f"stagewright {command}: {error}\n")
    return EXIT_WRONG_INPUT
