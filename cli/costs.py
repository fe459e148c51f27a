"""Costs on the command line, as in ``--costs F=1,I=1.3,W=0.7,send=0.05``."""

import argparse
from dataclasses import fields
from typing import Final

from stagewright.schedules import Costs, ScheduleError

# The papers' letters; every other field of Costs goes by its own name.
_LETTERS: Final = {
    "F": "forward",
    "B": "backward",
    "I": "input_gradient",
    "W": "weight_gradient",
    "F&B": "overlapped",
}

_OTHERS: Final = sorted({field.name for field in fields(Costs)} - {*_LETTERS.values()})

COSTS_HELP: Final = (
    "what each kind of instruction takes, such as F=1,I=1.3,W=0.7,send=0.05 or (one a stage) F=1:1:1:2,B=2; "
    f"kinds are {', '.join(_LETTERS)} and {', '.join(_OTHERS)} (default F=1,I=1,W=1,send=0)"
)


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Add ``--costs`` to a parser; its value is a `Costs`."""
    parser.add_argument("--costs", type=costs_of, default=Costs(), metavar="KIND=T,…", help=COSTS_HELP)


def costs_of(text: str) -> Costs:
    """Read costs; a number for all stages, or one a stage with colons between them.

    Raises:
        argparse.ArgumentTypeError: a kind is unknown or given twice, or a value is no duration.
    """
    known = {field.name for field in fields(Costs)}
    given: dict[str, float | tuple[float, ...]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, equals, value = part.partition("=")
        name = _LETTERS.get(kind.strip(), kind.strip())
        if not equals or name not in known:
            names = ", ".join([*_LETTERS, *sorted(known)])
            raise argparse.ArgumentTypeError(f"costs are written KIND=DURATION with KIND one of {names}: got {part!r}")
        if name in given:
            raise argparse.ArgumentTypeError(f"each kind has one cost: {kind} is given twice in {text!r}")
        given[name] = _durations(value, part)
    try:
        return Costs(**given)  # type: ignore[arg-type]  # the names are those of its fields, the values durations
    except ScheduleError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _durations(value: str, part: str) -> float | tuple[float, ...]:
    try:
        numbers = tuple(float(number) for number in value.split(":"))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 <= number < float("inf") for number in numbers):
        raise argparse.ArgumentTypeError(f"a cost is a number from 0 up, or one a stage as in F=1:1:2: got {part!r}")
    return numbers[0] if len(numbers) == 1 else numbers
