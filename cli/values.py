"""Values of flags, read and checked before anything heavy is imported."""

import argparse


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
