"""What `stagewright explain` prints."""

from collections.abc import Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stagewright.schedules.drawing.caption import shape_of
from stagewright.schedules.explanation import Contribution, Explanation, Split

PARTS: Final = ("inherent", "imbalance", "communication", "overhead")
MEANINGS: Final = """\
inherent: the schedule's own bubble, if all instructions of a kind took the same time and messages none
imbalance: more, or less, because they take different times
communication: more because ranks are busy with messages, and wait for them
overhead: the rest; the engine between instructions, late messages, a processor that was taken away"""


def show_explanation(console: Console, explanation: Explanation, title: str, num_dearest: int) -> None:
    """Print where the time of each rank went, and the instructions that cost most."""
    measured, predicted = explanation.measured, explanation.predicted
    difference = measured.makespan / predicted.makespan - 1 if predicted.makespan else 0.0
    console.print(Text.assemble((title, "bold"), f"\n{shape_of(measured)}"), soft_wrap=True)
    console.print(
        f"the step took {milliseconds(measured.makespan)} ms; predicted {milliseconds(predicted.makespan)} ms "
        f"({difference:+.1%})\n",
        highlight=False,
        soft_wrap=True,
    )
    console.print(split_table(explanation.splits))
    console.print(Text(MEANINGS, style="dim"), "\n", sep="")
    console.print(dearest_table(explanation.contributions[:num_dearest]))
    console.print(
        Text(
            "on the chain of instructions that makes the step as long as it is. longer: than the mean of its kind; all "
            "of it, where it does not compute. late: from the end of what it waited for to its start.",
            style="dim",
        )
    )


def split_table(splits: Sequence[Split]) -> Table:
    """One line a rank, in milliseconds; the parts as shares of the step too."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("rank", "step, ms", "computing", *PARTS):
        table.add_column(heading, justify="right", no_wrap=True)
    for split in splits:
        parts = [getattr(split, name) for name in ("computing", *PARTS)]
        table.add_row(str(split.rank), milliseconds(split.step), *(_with_share(part, split.step) for part in parts))
    return table


def dearest_table(contributions: Sequence[Contribution]) -> Table:
    """One line an instruction, in milliseconds."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("instruction", "rank", "at, ms", "took", "cost", "longer", "late"):
        table.add_column(heading, justify="left" if heading == "instruction" else "right", no_wrap=True)
    for contribution in contributions:
        event = contribution.event
        times = (event.start, event.end - event.start, contribution.cost, contribution.longer, contribution.late)
        table.add_row(str(event.instruction), str(event.rank), *map(milliseconds, times))
    return table


def milliseconds(seconds: float) -> str:
    """To the microsecond where it is short."""
    digits = 1 if abs(seconds) >= 0.01 else 2 if abs(seconds) >= 0.001 else 3
    return f"{1e3 * seconds + 0.0:.{digits}f}"


def _with_share(part: float, step: float) -> str:
    return f"{milliseconds(part)} {part / step if step else 0.0:>4.0%}"
