"""The flags of the command, and the words that teach them."""

import argparse
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Literal, NoReturn

from stagewright.cli import compare_command, show_command, verify_command
from stagewright.cli.settings import DTYPES, OPTIMIZERS, TrainSettings
from stagewright.cli.torchrun import torchrun_num_ranks
from stagewright.schedules import ScheduleError, add_arguments, from_arguments

OVERVIEW = """\
examples:
  stagewright list                                       the schedules there are
  stagewright show 1f1b --ranks 4 --microbatches 8       who computes what, and when
  stagewright show zbv --ranks 4 -o zbv.svg              the same as a picture (svg, html) or data (csv, json, trace)
  stagewright compare --ranks 8 --microbatches 32        bubbles, stashes and sends of all schedules in one table
  stagewright verify program.csv                         whether a program from elsewhere is legal
  stagewright train                                      a small GPT on 2 local processes
  stagewright train --schedule gpipe --ranks 4           the same model and the same losses, another schedule
  stagewright train --schedule 2bw --ranks 4             without flushes, on weights that are one update old

A schedule of your own is one decorated class in a module: --schedule-module my_schedules makes its name known to list,
show, compare and train. `stagewright COMMAND --help` says more about each command.
"""

TRAIN_EXAMPLES = """\
examples:
  stagewright train                                        1F1B on 2 local processes, the standard library's sources
  stagewright train --schedule gpipe --ranks 4 --microbatches 8 --steps 200
  stagewright train --schedule 2bw --ranks 2               without flushes, on weights that are one update old
  stagewright train --schedule interleaved --chunks 2 --recompute full --dtype bfloat16 --clip 1 --tie
  stagewright train --data ~/notes --layers 6 --hidden 192 --lr 1e-3 --optimizer muon
  stagewright train --global-batch-size 32 --micro-batch-size 4        the Megatron way to say --microbatches 8
  stagewright train --quiet --metrics run.jsonl            the table alone, and one JSON object a step
  stagewright train --sample "def " "class "               at the end, what the model writes after these prompts

  torchrun --nproc-per-node 2 -m stagewright.cli train     the ranks that torchrun starts, here 2 on this machine

  on two machines, the same command on both, with --node-rank 0 on the first and 1 on the second:
  torchrun --nnodes 2 --nproc-per-node 1 --node-rank 0 --master-addr FIRST --master-port 29500 \\
      -m stagewright.cli train

Every batch has --batch-size sequences, cut into --microbatches; the model is cut into as many stages as the schedule
has. The same seed gives the same losses for every synchronous schedule, number of ranks and number of microbatches
(with --dropout, the microbatches must be the same too). 2bw and pipedream compute on older weights and have curves of
their own. The rank that has the loss reports. At the end, bits per byte on files that were held out.
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
        "--batch-size", type=count, metavar="N", help=f"sequences of one batch (default {TrainSettings.batch_size})"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=count, metavar="N", help="transformer layers (default %(default)s)")
    model.add_argument("--hidden", type=count, metavar="N", help="width of the activations (default %(default)s)")
    model.add_argument("--heads", type=count, metavar="N", help="attention heads (default %(default)s)")
    model.add_argument("--dropout", type=float, metavar="P", help="share that is dropped (default %(default)s)")
    model.add_argument("--tie", action="store_true", help="one weight for embedding and head, whatever their ranks")
    _add_learning(parser)
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


def _add_learning(parser: argparse.ArgumentParser) -> None:
    learning = parser.add_argument_group("learning")
    learning.add_argument("--steps", type=count, metavar="N", help="updates (default %(default)s)")
    learning.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        help="muon: for the matrices of the layers, adamw for the rest; sgd: with momentum 0.9 (default %(default)s)",
    )
    learning.add_argument("--lr", type=positive, metavar="X", help="highest learning rate (default %(default)s)")
    learning.add_argument(
        "--clip", type=positive, metavar="NORM", help="clip the gradients of all stages together to this norm"
    )
    learning.add_argument(
        "--accumulate",
        type=count,
        metavar="N",
        help="batches of one update, their losses averaged (default 1)",
    )
    learning.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of weights and activations (default %(default)s). With bfloat16 and float16 the optimizer trains fp32 "
        "copies, and gradients are added up in fp32; float16 also scales the loss, by a factor that halves on all "
        "ranks when a gradient overflows on any, which skips the update",
    )
    learning.add_argument(
        "--recompute",
        type=recompute,
        metavar="off|full|K",
        help="full: keep only the input of every forward, and run it again when its gradient is due; "
        "K: all but the last K microbatches of a batch (default %(default)s)",
    )
    learning.add_argument("--seed", type=int, metavar="N", help="of weights, text order, dropout (default %(default)s)")


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


def count(text: str) -> int:
    """Read a whole number from 1 up."""
    if text.isascii() and text.isdigit() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"a whole number from 1 up is needed: got {text!r}")


def positive(text: str) -> float:
    """Read a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if 0.0 < value < float("inf"):
        return value
    raise argparse.ArgumentTypeError(f"a number above 0 is needed: got {text!r}")


def recompute(text: str) -> Literal["off", "full"] | int:
    """Read `off`, `full`, or a whole number from 0 up."""
    match text:
        case "off" | "full":
            return text
        case _ if text.isascii() and text.isdigit():
            return int(text)
        case _:
            raise argparse.ArgumentTypeError(f"off, full or a whole number from 0 up is needed: got {text!r}")


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
