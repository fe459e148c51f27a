"""`stagewright bench`: what the engine takes on this machine, against predictions and peers."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

# Those of stagewright.bench, which imports this package and therefore runs as a process of its own.
NAMES: Final = ("bubble", "overhead", "throughput", "memory", "schedules")

EXAMPLES: Final = """\
examples:
  stagewright bench                          all of them, in less than ten minutes, and a report in build/bench
  stagewright bench bubble                   are the bubbles real: formula, simulated, measured
  stagewright bench overhead throughput      against torch.distributed.pipelining and loops written by hand

Nothing else should run on the machine meanwhile. ! marks a bar that is missed.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `bench` command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure bubbles, overhead, throughput and memory on this machine",
        description="Measure on this machine, against what is predicted and against peers, and write a report.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="BENCH", help=f"of {', '.join(NAMES)} (default all)")
    parser.add_argument(
        "--out", type=Path, default=Path("build/bench"), metavar="DIR", help="for the report (default %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write the report; exit code 2 where a name is wrong."""
    unknown = [name for name in arguments.names if name not in NAMES]
    if unknown:
        sys.stderr.write(f"stagewright bench: there is no bench {unknown[0]!r}: there are {', '.join(NAMES)}\n")
        return 2
    return subprocess.call([sys.executable, "-m", "stagewright.bench", *arguments.names, "--out", str(arguments.out)])
