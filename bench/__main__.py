"""Run the benches named, or all that do not take long."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from stagewright.bench import asynchronous, prediction, schedules, split_backward, staleness

BENCHES: Final[Mapping[str, Callable[[Sequence[str]], int]]] = MappingProxyType(
    {
        "schedules": schedules.main,
        "split_backward": split_backward.main,
        "asynchronous": asynchronous.main,
        "prediction": prediction.main,
        "staleness": staleness.main,
    }
)
# Those that train for minutes run only where they are named.
LONG: Final = ("prediction", "staleness")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run each bench with its defaults; the exit code is the first that is not 0."""
    parser = argparse.ArgumentParser(
        prog="python -m stagewright.bench",
        description="Run benches with their defaults; python -m stagewright.bench.NAME takes more arguments.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)} (default all but {', '.join(LONG)})"
    )
    names = parser.parse_args(arguments).names
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        parser.error(f"there is no bench {unknown[0]!r}: there are {', '.join(BENCHES)}")
    codes = [BENCHES[name]([]) for name in names or (name for name in BENCHES if name not in LONG)]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
