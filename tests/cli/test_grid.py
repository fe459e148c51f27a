"""The grid in colour says what the plain one says."""

import io

import pytest
from rich.console import Console
from rich.style import Style

from stagewright.cli.grid import grid_rich
from stagewright.schedules import Costs, Program, Timeline, create, names, simulate
from stagewright.schedules.drawing import grid_text
from stagewright.schedules.drawing.palettes import Palette, hexadecimal, palette_of

BASIC_KINDS = {"blue": "F", "green": "B", "cyan": "I", "yellow": "W"}
EITHER_PALETTE = pytest.mark.parametrize("palette", [palette_of("megatron"), None], ids=["rgb", "basic"])


def timeline(name: str, num_ranks: int = 4, num_microbatches: int = 8) -> Timeline:
    return simulate(create(name, num_ranks=num_ranks, num_microbatches=num_microbatches).program(), Costs())


def papers(timeline: Timeline, palette: Palette | None) -> str:
    """Replace every character of the grid by the kind whose colour lies under it."""
    (panel,) = grid_rich(timeline, palette=palette)
    kinds = {hexadecimal(palette.color(kind)): kind for kind in "FBIW"} if palette else BASIC_KINDS
    letters = ["\n" if letter == "\n" else " " for letter in panel.plain]
    for span in panel.spans:
        if isinstance(span.style, Style) and span.style.bgcolor is not None:
            letters[span.start : span.end] = kinds[span.style.bgcolor.name] * (span.end - span.start)
    return "".join(letters)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("costs", [Costs(), Costs(forward=1.0, backward=2.618)], ids=["ticks", "to scale"])
def test_colours_change_no_letter(name: str, costs: Costs) -> None:
    drawn = simulate(create(name, num_ranks=4, num_microbatches=8).program(), costs)
    assert [panel.plain for panel in grid_rich(drawn)] == [grid_text(drawn)]


@EITHER_PALETTE
def test_a_cell_has_the_colour_of_its_kind_to_its_very_end(palette: Palette | None) -> None:
    drawn = timeline("1f1b", 2, 2)
    assert grid_text(drawn).splitlines() == [
        "rank 0  F0 F1 .. .. B0 -- .. B1 --",
        "rank 1  .. F0 B0 -- F1 B1 -- .. ..",
    ]
    assert papers(drawn, palette).splitlines() == [
        "        FF FF       BBBBB    BBBBB",
        "           FF BBBBB FF BBBBB      ",
    ]


@EITHER_PALETTE
def test_cells_of_one_length_are_painted_equally_wide(palette: Palette | None) -> None:
    drawn = timeline("gpipe", 1, 11)
    assert grid_text(drawn).startswith("rank 0  F0  F1  F2 ")
    assert papers(drawn, palette).startswith("        " + "FFF " * 11 + "BBBBBBB " * 10)


@EITHER_PALETTE
def test_the_halves_of_a_fused_pair_keep_their_colours(palette: Palette | None) -> None:
    drawn = simulate(Program.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0I1,0W1\n"), Costs(overlapped=2.0))
    (plain,) = grid_text(drawn).splitlines()
    (paper,) = papers(drawn, palette).splitlines()
    middle = plain.index("&")
    assert paper[plain.index("F1") : middle] == "FF"
    assert paper[middle : middle + 3] == "BBB"
    assert paper[plain.index("I1")] == "I"
    assert paper[plain.index("W1")] == "W"


def test_later_chunks_are_told_apart() -> None:
    looped = simulate(Program.from_csv("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n"), Costs())
    for palette in (palette_of("megatron"), None):
        (panel,) = grid_rich(looped, palette=palette)
        styles = {span.style for span in panel.spans if isinstance(span.style, Style)}
        assert len(styles) == 4


@EITHER_PALETTE
def test_a_terminal_sees_the_colours_and_a_pipe_does_not(palette: Palette | None) -> None:
    piped, terminal = io.StringIO(), io.StringIO()
    Console(file=piped, width=200, _environ={}).print(*grid_rich(timeline("1f1b"), palette=palette))
    Console(file=terminal, width=200, force_terminal=True, color_system="truecolor", _environ={}).print(
        *grid_rich(timeline("1f1b"), palette=palette)
    )
    assert piped.getvalue() == grid_text(timeline("1f1b")) + "\n"
    assert "\x1b[" in terminal.getvalue()


@pytest.mark.parametrize("width", [12, 24, 40, 41, 42, 43, 80])
def test_a_grid_wider_than_the_terminal_breaks_between_two_ticks(width: int) -> None:
    drawn = timeline("1f1b", 4, 4)
    panels = [panel.plain.splitlines() for panel in grid_rich(drawn, width)]
    assert all(len(line) <= width for panel in panels for line in panel)
    for rank, line in enumerate(grid_text(drawn).splitlines()):
        cells = [panel[rank].removeprefix(f"rank {rank}").split() for panel in panels]
        assert [cell for some in cells for cell in some] == line.removeprefix(f"rank {rank}").split()
        assert len({len(some) for some in cells[:-1]}) <= 1


def test_versions_are_told_apart_without_a_palette() -> None:
    """Where there are no tints, those with an odd number are underlined."""
    (grid,) = grid_rich(simulate(create("2bw", num_ranks=2, num_microbatches=2).program(3)), versions=True)
    underlined = {
        grid.plain[span.start : span.end].strip() for span in grid.spans if getattr(span.style, "underline", 0)
    }
    assert {"F4@1", "F5@1"} <= underlined
    assert all(text.rstrip("-").strip().endswith("@1") for text in underlined)
