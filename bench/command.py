"""Command: the command line of the benches that measure schedules in some steps and make one table."""

import argparse
from collections.abc import Callable, Sequence

from rich.console import Console

from stagewright.bench.report import Section, print_section
from stagewright.cli.values import count
from stagewright.schedules import names


def run_bench(
    name: str,
    measure: Callable[[Sequence[str] | None, int], Section],
    arguments: Sequence[str] | None,
    *,
    description: str | None,
    num_steps: int,
    steps: str,
    choices: Sequence[str] | None = None,
) -> int:
    """Measure as the arguments say and print the table; the exit code is 1 where a bar is missed.

    Args:
        name: of the bench's module.
        measure: gets the schedules named, or None for all there are, and the number of steps.
        arguments: those of the command line where left out.
        description: what it does, for the help.
        num_steps: where none are given.
        steps: which these are, for the help.
        choices: the schedules to choose from; all there are where left out.
    """
    parser = argparse.ArgumentParser(prog=f"python -m stagewright.bench.{name}", description=description)
    help_of_only = "of these schedules alone (default all there are)"
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=choices or names(), help=help_of_only)
    parser.add_argument("--steps", type=count, default=num_steps, metavar="N", help=f"{steps} (default %(default)s)")
    parsed = parser.parse_args(arguments)
    section = measure(parsed.only, parsed.steps)
    print_section(section, Console())
    return int(section.misses > 0)
