"""`stagewright list` and `stagewright show`: schedules to look at."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stagewright.cli.grid import grid_rich
from stagewright.schedules import Costs, Schedule, Timeline, find, names, simulate
from stagewright.schedules.drawing.palettes import palette_of


def list_schedules(console: Console) -> None:
    """Print every schedule's name and what it is, one line each."""
    width = max(map(len, names()))
    for name in names():
        line = Text.assemble((name.ljust(width), "bold"), "  ", find(name).summary)
        console.print(line, soft_wrap=True)


def show_schedule(console: Console, schedule: Schedule, costs: Costs) -> None:
    """Print a schedule's grid under its name, and what the simulation says of it."""
    timeline = simulate(schedule.program(), costs)
    palette = palette_of("megatron") if console.color_system in ("256", "truecolor") else None
    panels = grid_rich(timeline, console.width if console.is_terminal else None, palette)
    shape = f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_microbatches} microbatches"
    title = Text.assemble((schedule.name, "bold"), f": {schedule.summary}\n{shape}")
    for part in (title, *panels):
        console.print(part, "\n", sep="", soft_wrap=True)
    console.print(figures(schedule, timeline))


def figures(schedule: Schedule, timeline: Timeline) -> Table:
    """Tabulate makespan, both bubble ratios and the peak stash, each with its unit or denominator."""
    table = Table.grid(padding=(0, 2))
    table.add_row("makespan", f"{timeline.makespan:g} ticks")
    table.add_row("bubble fraction", f"{timeline.bubble_fraction:.4f}", "idle / (ranks x makespan)")
    table.add_row("bubble overhead", f"{timeline.bubble_overhead:.4f}", "(makespan - ideal) / ideal")
    formula = schedule.bubble_formula(timeline.costs)
    if formula is not None:
        table.add_row("by the formula", f"{formula.fraction:.4f}", f"{formula.text} idle, of the {formula.measure}")
    table.add_row("peak stash", " ".join(map(str, timeline.peak_stash)), "microbatches of one stage, by rank")
    return table
