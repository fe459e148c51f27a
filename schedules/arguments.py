"""Arguments: the flags that select a schedule, for any trainer's argparse parser."""

import argparse
import importlib
from collections.abc import Sequence
from typing import Final

from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.registry import create
from stagewright.schedules.schedule import Schedule

# Options that the other flags say.
RESERVED: Final = ("name", "num_ranks", "num_microbatches", "num_chunks", "costs")


def add_arguments(parser: argparse.ArgumentParser, *, schedule: str = "1f1b", num_ranks: int = 2) -> None:
    """Add ``--schedule --ranks --chunks --microbatches`` to a parser, and Megatron's pair of batch sizes.

    Args:
        parser: gets one argument group, "pipeline".
        schedule, num_ranks: the defaults.
    """
    group = parser.add_argument_group("pipeline")
    group.add_argument(
        "--schedule", default=schedule, metavar="NAME", help=f"in which order the ranks compute (default {schedule})"
    )
    group.add_argument(
        "--schedule-module", metavar="MODULE", help="import this module first, for the schedules it registers"
    )
    group.add_argument(
        "--schedule-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the schedule's own, such as num_waves=2 or replicas=2,1 (may be repeated)",
    )
    group.add_argument(
        "--ranks", type=int, default=num_ranks, metavar="P", help=f"ranks of the pipeline (default {num_ranks})"
    )
    group.add_argument(
        "--chunks", type=int, metavar="V", help="stages that each rank owns, for schedules that let one choose"
    )
    group.add_argument(
        "--microbatches", type=int, metavar="M", help="microbatches of one batch (default twice the ranks)"
    )
    group.add_argument(
        "--micro-batch-size",
        type=int,
        metavar="ROWS",
        help="with --global-batch-size: another way to say --microbatches",
    )
    group.add_argument("--global-batch-size", type=int, metavar="ROWS", help="rows of one batch over all microbatches")


def from_arguments(arguments: argparse.Namespace, **options: object) -> Schedule:
    """The schedule that the parsed flags select.

    Args:
        arguments: what a parser with ``add_arguments`` returned.
        options: further options of the schedule.

    Raises:
        ScheduleError: the flags contradict each other, or select no valid schedule.
    """
    import_schedules(arguments.schedule_module)
    options |= read_options(arguments.schedule_option)
    if arguments.chunks is not None:
        options["num_chunks"] = arguments.chunks
    return create(
        arguments.schedule, num_ranks=arguments.ranks, num_microbatches=_num_microbatches(arguments), **options
    )


def import_schedules(module: str | None) -> None:
    """Import a module for the schedules that it registers; nothing where none is named.

    Raises:
        ScheduleError: it cannot be imported.
    """
    if module is not None:
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever the user's module raises
            what = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
            raise ScheduleError(f"--schedule-module {module}: {what}{error}") from error


def read_options(texts: Sequence[str]) -> dict[str, object]:
    """The options that ``NAME=VALUE`` texts give: whole and other numbers, true/false and numbers between commas
    (``replicas=2,1``; of one alone, ``3,``) as such, all else as text.

    Raises:
        ScheduleError: a text is not of that form.
    """
    options: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ScheduleError(f"an option of a schedule is written NAME=VALUE, such as num_waves=2: got {text!r}")
        if name in RESERVED:
            raise ScheduleError(f"--schedule-option {text}: {name} has a flag of its own")
        options[name] = _read_value(value)
    return options


def _read_value(text: str) -> object:
    if "," in text:
        members = tuple(map(_read_value, text.removesuffix(",").split(",")))
        return text if any(isinstance(member, str) for member in members) else members
    if text.lower() in ("true", "false", "yes", "no", "on", "off"):
        return text.lower() in ("true", "yes", "on")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _num_microbatches(arguments: argparse.Namespace) -> int:
    given: int | None = arguments.microbatches
    rows, batch = arguments.micro_batch_size, arguments.global_batch_size
    if rows is None:
        default: int = 2 * arguments.ranks
        return default if given is None else given
    if batch is None:
        raise ScheduleError(
            "--micro-batch-size needs --global-batch-size beside it, to say how many microbatches there are"
        )
    if rows < 1 or batch % rows:
        raise ScheduleError(
            f"the global batch is a whole number of microbatches: got --global-batch-size {batch} with "
            f"--micro-batch-size {rows}"
        )
    count: int = batch // rows
    if given is not None and given != count:
        raise ScheduleError(f"--microbatches {given} contradicts {batch} / {rows} = {count}; give one of them")
    return count
