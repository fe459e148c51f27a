"""Interleaved 1F1B against the tables of Megatron-LM."""

import pytest

from stagewright.schedules import Costs, create, simulate
from stagewright.schedules.instructions import Backward, Forward
from stagewright.schedules.library.interleaved import Interleaved


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int, group_size: int | None = None) -> Interleaved:
    return Interleaved(num_ranks, num_microbatches, num_chunks, group_size)


def chunks(schedule: Interleaved, rank: int) -> str:
    """+c for a forward of chunk c, -c for a backward, counted from 1."""
    signed = []
    for instruction in schedule.order(rank):
        assert isinstance(instruction, Forward | Backward)
        chunk = instruction.stage // schedule.num_ranks + 1
        signed.append(str(chunk if isinstance(instruction, Forward) else -chunk))
    return " ".join(signed)


def num_warmup(schedule: Interleaved, rank: int) -> int:
    """Forwards before the first (forward, backward) pair."""
    kinds = [type(instruction) for instruction in schedule.order(rank)]
    return kinds.index(Backward) - 1


@pytest.mark.parametrize(
    ("group_size", "num_microbatches", "microbatches"),
    [(2, 4, "0 1 0 1 2 3 2 3"), (3, 5, "0 1 2 0 1 2 3 4 3 4")],
)
def test_microbatches_of_the_forwards(group_size: int, num_microbatches: int, microbatches: str) -> None:
    schedule = interleaved(2, num_microbatches, 2, group_size)
    forwards = [cell.microbatch for cell in schedule.order(0) if isinstance(cell, Forward)]
    assert " ".join(map(str, forwards)) == microbatches


def test_chunks_of_uneven_groups() -> None:
    schedule = interleaved(2, 5, 2, 3)
    assert chunks(schedule, 0) == "1 1 1 2 2 2 -2 1 -2 1 -2 2 -1 2 -1 -1 -2 -2 -1 -1"


def test_chunks_of_even_groups() -> None:
    schedule = interleaved(2, 4, 2)
    assert chunks(schedule, 0) == "1 1 2 2 1 -2 1 -2 2 -1 2 -1 -2 -2 -1 -1"
    assert chunks(schedule, 1) == "1 1 2 -2 2 -2 1 -1 1 -1 2 -2 2 -2 -1 -1"


@pytest.mark.parametrize(
    ("schedule", "warmups"), [(interleaved(4, 8, 2), [10, 8, 6, 4]), (interleaved(4, 9, 2, 5), [11, 9, 7, 5])]
)
def test_warmup(schedule: Interleaved, warmups: list[int]) -> None:
    assert [num_warmup(schedule, rank) for rank in range(4)] == warmups


@pytest.mark.parametrize(("num_chunks", "peaks"), [(2, (11, 9, 7, 5)), (4, (19, 17, 15, 13))])
def test_peak_in_flight(num_chunks: int, peaks: tuple[int, ...]) -> None:
    assert simulate(interleaved(4, 8, num_chunks).program()).peak_stash == peaks


def test_six_microbatches_on_four_ranks() -> None:
    """What Megatron-LM refuses; its bubble is a quarter, whatever the costs."""
    program = create("vpp", num_ranks=4, num_microbatches=6).program()
    assert simulate(program, Costs(forward=1, backward=1)).bubble_overhead == 1 / 4
    assert simulate(program, Costs(forward=1, backward=2)).bubble_overhead == 1 / 4
