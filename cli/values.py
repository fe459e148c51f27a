"""Values of flags, read and checked before anything heavy is imported."""

import argparse
from pathlib import Path
from typing import Literal


def count(text: str) -> int:
    """Read a whole number from 1 up."""
    if text.isascii() and text.isdigit() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"a whole number from 1 up is needed: got {text!r}")


def cut_choice(text: str) -> str:
    """Read how a model is cut; what fits the model is seen later."""
    match text.partition("="):
        case ("even" | "parameters" | "measured", "", ""):
            return text
        case ("layout", "=", layout) if layout:
            return text
        case ("counts", "=", counts) if all(number.isascii() and number.isdigit() for number in counts.split(",")):
            return text
        case _:
            raise argparse.ArgumentTypeError(
                f"even, parameters, measured, counts=N,N,… or layout=Et|…|tL is needed: got {text!r}"
            )


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


def resumed_folder(text: str) -> Path | Literal[True]:
    """Read a folder, or `auto`: that of --save, where there may be nothing yet."""
    return True if text == "auto" else Path(text)


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
