"""The `stagewright` command."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from stagewright.cli import (
    bench_command,
    compare_command,
    explain_command,
    profile_command,
    show_command,
    verify_command,
)
from stagewright.cli.arguments import build_parser
from stagewright.cli.console import PatientConsole
from stagewright.cli.entry import EXIT_INTERRUPTED
from stagewright.cli.launcher import is_first_rank, is_launched
from stagewright.cli.metrics import MetricsError
from stagewright.cli.show import list_schedules
from stagewright.cli.train_arguments import train_settings
from stagewright.schedules import ScheduleError
from stagewright.schedules.arguments import import_schedules

EXIT_WRONG_INPUT = 2
# As a shell reports what SIGPIPE ended.
EXIT_UNREAD = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 2 where the input is wrong, 130 where it was interrupted."""
    parsed = build_parser().parse_args(arguments)
    if getattr(parsed, "schedule_module", None) is not None:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; an installed script does not look there
    try:
        match parsed.command:
            case "list":
                return printed(run_list, parsed)
            case "show":
                return printed(show_command.run, parsed)
            case "compare":
                return printed(compare_command.run, parsed)
            case "verify":
                return printed(verify_command.run, parsed)
            case "explain":
                return printed(explain_command.run, parsed)
            case "bench":
                return bench_command.run(parsed)
            case "profile":
                return printed(profile_command.run, parsed)
            case _:
                return run_train(parsed)
    except KeyboardInterrupt:
        if is_launched():  # torchrun passes on what its terminal has told every rank already
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if is_first_rank():
            # A terminal shows ^C, and maybe half a progress bar, on the line where the cursor stands.
            sys.stderr.write("\ninterrupted\n" if sys.stderr.isatty() else "interrupted\n")
        return EXIT_INTERRUPTED


def printed(run: Callable[[argparse.Namespace], int], parsed: argparse.Namespace) -> int:
    """Run a command that only prints, to a reader who may have had enough before the end, as `head` has."""
    try:
        code = run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor may Python complain when it ends
        return EXIT_UNREAD
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(f"stagewright {parsed.command}: cannot write the output: {error.strerror or error}\n")
        return EXIT_WRONG_INPUT
    return code


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
        console = PatientConsole()
        if train_command.has_finished(settings, corpus, console):
            return 0
    except ValueError as error:
        return complain("train", error)
    try:
        train_command.run(settings, corpus, console)
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
