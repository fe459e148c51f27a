"""`stagewright profile`: what each layer of the demo's model costs on this machine."""

import argparse
import sys
from pathlib import Path
from typing import Final

from rich.console import Console

from stagewright.cli.settings import DTYPES, TrainSettings
from stagewright.cli.values import count

EXAMPLES: Final = """\
examples:
  stagewright profile                                         the model of `stagewright train`, layer by layer
  stagewright profile --layers 8 --hidden 256 --out gpt.json  a larger one, written to a file
  stagewright train --layers 8 --hidden 256 --cut measured --profile gpt.json
  stagewright profile --stages 4                              and how 4 stages would divide it

A part is run on one microbatch, as many times as --rounds says, and its shortest times count. --stages also prints the
cut whose slowest stage is as fast as can be, and what its stages cost, for the --costs of show and compare.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `profile` command."""
    parser = subparsers.add_parser(
        "profile",
        help="measure what each layer of a model costs",
        description="Measure what embedding, layers and head of the GPT cost on this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train = TrainSettings
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=count, default=train.layers, metavar="N", help="(default %(default)s)")
    model.add_argument("--hidden", type=count, default=train.hidden, metavar="N", help="(default %(default)s)")
    model.add_argument("--heads", type=count, default=train.heads, metavar="N", help="(default %(default)s)")
    model.add_argument("--sequence", type=count, default=train.sequence, metavar="N", help="(default %(default)s)")
    model.add_argument("--dtype", choices=DTYPES, default=train.dtype, help="(default %(default)s)")
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument(
        "--micro-batch-size", type=count, default=4, metavar="N", help="sequences of a microbatch (default %(default)s)"
    )
    measuring.add_argument("--rounds", type=count, default=5, metavar="N", help="(default %(default)s)")
    measuring.add_argument("--seed", type=int, default=train.seed, metavar="N", help="(default %(default)s)")
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, metavar="FILE", help="write the profile to this file, as JSON")
    output.add_argument("--stages", type=count, metavar="N", help="print the best cut into so many stages")


def run(parsed: argparse.Namespace) -> int:
    """Measure, print, and write the file; 2 where the input is wrong."""
    from stagewright.cli.profile_report import profile_and_print  # late, because torch takes seconds to import

    try:
        profile_and_print(parsed, Console())
    except ValueError as error:
        sys.stderr.write(f"stagewright profile: {error}\n")
        return 2
    return 0
