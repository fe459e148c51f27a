"""Streams of the papers' own generators at P=4, M=8: the same order where it has a closed form, never a worse one."""

import csv
from dataclasses import dataclass
from pathlib import Path

import pytest

from stagewright.schedules import Program, create, names, simulate
from stagewright.schedules.instructions import Backward, Forward, InputGradient, Overlap, WeightGradient

DATA = Path(__file__).parents[2] / "data"

# The stream, the schedule and its options, and whether its order has a closed form.
STREAMS = [
    ("gpipe", "gpipe", {}, True),
    ("1f1b", "1f1b", {}, True),
    ("interleaved_V2", "interleaved", {"num_chunks": 2}, True),
    ("bfs_V2", "bfs", {"num_chunks": 2}, True),
    ("zb-h1", "zb-h1", {}, True),
    ("zb-h2", "zb-h2", {}, True),
    ("gis_V2_gP", "gis", {"num_chunks": 2, "group_size": 4}, True),
    ("gis_V2_gPhalf", "gis", {"num_chunks": 2, "group_size": 2}, True),
    ("interleaved-zb_V2", "interleaved-zb", {"num_chunks": 2}, True),
    ("zb-1p", "zb-1p", {}, False),
    ("zb-2p", "zb-2p", {}, False),
    ("zbv", "zbv", {}, False),
    ("v-half", "v-half", {}, False),
    ("v-min", "v-min", {}, False),
]
REGISTERED = [row for row in STREAMS if row[1] in names()]


@dataclass(frozen=True)
class Figures:
    """A stream's makespan and span, and the most that any rank stashes, in microbatches of the whole rank."""

    makespan: float
    span: float
    peak: float


def published(stream: str) -> Figures:
    with (DATA / "streams_P4_M8.csv").open(encoding="utf-8") as file:
        row = next(row for row in csv.DictReader(file) if row["stream"] == stream)
    return Figures(float(row["makespan"]), float(row["span"]), max(map(float, row["peak"].split())))


def figures(program: Program) -> Figures:
    timeline = simulate(program)
    return Figures(timeline.makespan, timeline.span, max(timeline.peak_stash) / program.placement.num_chunks)


def computations(program: Program) -> list[str]:
    kinds = Forward | Backward | InputGradient | WeightGradient | Overlap
    return [" ".join(str(cell) for cell in stream if isinstance(cell, kinds)) for stream in program.streams]


def reference(stream: str) -> Program:
    return Program.from_csv((DATA / "streams" / f"{stream}_P4_M8.csv").read_text("utf-8"))


@pytest.mark.parametrize(("stream", "name", "options"), [row[:3] for row in REGISTERED if row[3]])
def test_same_order_token_for_token(stream: str, name: str, options: dict[str, object]) -> None:
    ours = create(name, num_ranks=4, num_microbatches=8, **options).program()
    assert computations(ours) == computations(reference(stream))


@pytest.mark.parametrize(("stream", "name", "options"), [row[:3] for row in REGISTERED])
def test_never_worse(stream: str, name: str, options: dict[str, object]) -> None:
    ours, theirs = figures(create(name, num_ranks=4, num_microbatches=8, **options).program()), published(stream)
    assert ours.makespan <= theirs.makespan
    assert ours.span <= theirs.span
    assert ours.peak <= theirs.peak


@pytest.mark.parametrize("stream", [row[0] for row in STREAMS])
def test_the_published_figures_are_those_of_the_streams(stream: str) -> None:
    """Our simulation agrees with the sources about their own streams."""
    assert figures(reference(stream)) == published(stream)
