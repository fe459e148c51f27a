"""The flags of the command, and the words that teach them."""

import argparse
import sys
from typing import NoReturn

from stagewright.cli import (
    bench_command,
    compare_command,
    explain_command,
    profile_command,
    show_command,
    train_arguments,
    verify_command,
)

OVERVIEW = """\
examples:
  stagewright list                                       the schedules there are
  stagewright show 1f1b --ranks 4 --microbatches 8       who computes what, and when
  stagewright show zbv --ranks 4 -o zbv.svg              the same as a picture (svg, html) or data (csv, json, trace)
  stagewright compare --ranks 8 --microbatches 32        bubbles, stashes and sends of all schedules in one table
  stagewright explain step.json                          why a step that `train --trace` recorded took so long
  stagewright profile --out gpt.json                     what each layer costs on this machine
  stagewright verify program.csv                         whether a program from elsewhere is legal
  stagewright bench bubble                               whether the bubbles are real on this machine
  stagewright train                                      a small GPT on 2 local processes
  stagewright train --schedule gpipe --ranks 4           the same model and the same losses, another schedule
  stagewright train --schedule 2bw --ranks 4             without flushes, on weights that are one update old

A schedule of your own is one decorated class in a module: --schedule-module my_schedules makes its name known to list,
show, compare and train. `stagewright COMMAND --help` says more about each command.
"""


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Write one line and leave with exit code 2."""
        sys.stderr.write(f"{self.prog}: {message} (see {self.prog} --help)\n")
        raise SystemExit(2)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command."""
    parser: argparse.ArgumentParser = Parser(
        prog="stagewright",
        description="Pipeline-parallel schedules for PyTorch: look at one, or train with it.",
        epilog=OVERVIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="name the schedules, one line each", description="Name the schedules.")
    listing.add_argument(
        "--schedule-module", metavar="MODULE", help="import this module first, for the schedules it registers"
    )
    show_command.add_parser(commands)
    compare_command.add_parser(commands)
    verify_command.add_parser(commands)
    profile_command.add_parser(commands)
    explain_command.add_parser(commands)
    bench_command.add_parser(commands)
    train_arguments.add_parser(commands)
    return parser
