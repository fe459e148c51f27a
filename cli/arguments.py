"""The flags of the command, and the words that teach them."""

import argparse
import os
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import NoReturn

from stagewright.cli import compare_command, show_command, verify_command
from stagewright.cli.settings import TrainSettings
from stagewright.schedules import ScheduleError, add_arguments, from_arguments

OVERVIEW = """\
examples:
  stagewright list                                       the schedules there are
  stagewright show 1f1b --ranks 4 --microbatches 8       who computes what, and when
  stagewright compare --ranks 8 --microbatches 32        bubbles, stashes and sends of all schedules in one table
  stagewright verify program.csv                         whether a program from elsewhere is legal
  stagewright train                                      a small GPT on 2 local processes
  stagewright train --schedule gpipe --ranks 4           the same model, another schedule

`stagewright COMMAND --help` says more about each command.
"""

TRAIN_EXAMPLES = """\
examples:
  stagewright train                                        1F1B on 2 local processes, the standard library's sources
  stagewright train --schedule gpipe --ranks 4 --microbatches 8 --steps 200
  stagewright train --data ~/notes --layers 6 --hidden 192 --lr 1e-3
  stagewright train --global-batch-size 32 --micro-batch-size 4        the Megatron way to say --microbatches 8
  stagewright train --quiet --metrics run.jsonl            the table alone, and one JSON object a step
  stagewright train --sample "def " "class "               at the end, what the model writes after these prompts

  torchrun --nproc-per-node 2 -m stagewright.cli train     the ranks that torchrun starts, here 2 on this machine

  on two machines, the same command on both, with --node-rank 0 on the first and 1 on the second:
  torchrun --nnodes 2 --nproc-per-node 1 --node-rank 0 --master-addr FIRST --master-port 29500 \\
      -m stagewright.cli train

Every update reads --batch-size sequences, cut into --microbatches; the model is cut into as many stages as the schedule
has. The same seed gives the same losses for every schedule, number of ranks and number of microbatches (with --dropout,
the microbatches must be the same too). At the end, bits per byte on files that were held out.
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
    commands.add_parser("list", help="name the schedules, one line each", description="Name the schedules.")
    show_command.add_parser(commands)
    compare_command.add_parser(commands)
    verify_command.add_parser(commands)
    _add_train(
        commands.add_parser(
            "train",
            help="train a small byte-level GPT over a pipeline",
            description="Train a small byte-level GPT on real text over a pipeline of processes.",
            epilog=TRAIN_EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, num_ranks=torchrun_num_ranks() or 2)
    text = parser.add_argument_group("text")
    text.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="a file or a folder of text (default: the Python standard library's own sources)",
    )
    text.add_argument("--sequence", type=count, metavar="N", help="bytes of one sequence (default %(default)s)")
    text.add_argument(
        "--batch-size", type=count, metavar="N", help=f"sequences of one update (default {TrainSettings.batch_size})"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=count, metavar="N", help="transformer layers (default %(default)s)")
    model.add_argument("--hidden", type=count, metavar="N", help="width of the activations (default %(default)s)")
    model.add_argument("--heads", type=count, metavar="N", help="attention heads (default %(default)s)")
    model.add_argument("--dropout", type=float, metavar="P", help="share that is dropped (default %(default)s)")
    learning = parser.add_argument_group("learning")
    learning.add_argument("--steps", type=count, metavar="N", help="updates (default %(default)s)")
    learning.add_argument("--lr", type=duration, metavar="X", help="highest learning rate (default %(default)s)")
    learning.add_argument("--seed", type=int, metavar="N", help="of weights, text order, dropout (default %(default)s)")
    output = parser.add_argument_group("output")
    output.add_argument("--metrics", type=Path, metavar="FILE", help="write one JSON object a step to this file")
    output.add_argument(
        "--sample", type=prompt, nargs="+", metavar="TEXT", help="let the trained model continue these texts"
    )
    output.add_argument("--sample-bytes", type=count, metavar="N", help="how far, in bytes (default %(default)s)")
    output.add_argument(
        "--temperature",
        type=temperature,
        metavar="T",
        help="1 samples as the model predicts, 0 takes the likeliest byte (default %(default)s)",
    )
    output.add_argument("--quiet", action="store_true", help="print the closing table alone, and the samples")
    # --batch-size keeps None for "not given", so that --global-batch-size can stand in for it.
    defaults = {field.name: field.default for field in fields(TrainSettings) if field.default is not MISSING}
    parser.set_defaults(**defaults | {"batch_size": None})


def train_settings(arguments: argparse.Namespace) -> TrainSettings:
    """Turn the parsed flags of `train` into settings.

    Raises ScheduleError where they select no schedule, or contradict each other or torchrun.
    """
    num_started = torchrun_num_ranks()
    if num_started not in (None, arguments.ranks):
        raise ScheduleError(f"torchrun has started {num_started} ranks: got --ranks {arguments.ranks}; leave it out")
    given = {arguments.batch_size, arguments.global_batch_size} - {None}
    if len(given) > 1:
        raise ScheduleError(
            f"--batch-size {arguments.batch_size} contradicts --global-batch-size {arguments.global_batch_size}; "
            f"give one of them"
        )
    arguments.batch_size = given.pop() if given else TrainSettings.batch_size
    if arguments.micro_batch_size is not None:
        arguments.global_batch_size = arguments.batch_size
    arguments.schedule = from_arguments(arguments)
    arguments.sample = tuple(arguments.sample)
    return TrainSettings(**{field.name: getattr(arguments, field.name) for field in fields(TrainSettings)})


def torchrun_num_ranks() -> int | None:
    """Return the number of ranks that torchrun, or another launcher that sets its variables, has started, if any."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def is_first_rank() -> bool:
    """Say whether this process may speak for all: it is rank 0, or no launcher has started it."""
    return torchrun_num_ranks() is None or os.environ["RANK"] == "0"


def count(text: str) -> int:
    """Read a whole number from 1 up."""
    if text.isascii() and text.isdigit() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"a whole number from 1 up is needed: got {text!r}")


def duration(text: str) -> float:
    """Read a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if 0.0 < value < float("inf"):
        return value
    raise argparse.ArgumentTypeError(f"a number above 0 is needed: got {text!r}")


def temperature(text: str) -> float:
    """Read a number from 0 up."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0.0 <= value < float("inf"):
        return value
    raise argparse.ArgumentTypeError(f"a number from 0 up is needed: got {text!r}")


def prompt(text: str) -> str:
    """Read a text of one byte or more: the model knows only how to go on."""
    if text:
        return text
    raise argparse.ArgumentTypeError("a text with at least one byte is needed: got ''")
