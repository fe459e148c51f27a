"""Groups of microbatches: which sizes are legal, which one is chosen, and what a refusal says."""

import pytest

from stagewright.schedules import ScheduleError, create
from stagewright.schedules.library.looped import Grouped


def grouped(name: str, num_ranks: int, num_microbatches: int, group_size: int | None = None) -> Grouped:
    schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches, group_size=group_size)
    assert isinstance(schedule, Grouped)
    return schedule


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "group"),
    [(4, 8, 4), (4, 9, 5), (4, 6, 6), (4, 7, 7), (4, 14, 5), (4, 15, 5), (4, 3, 3), (4, 1, 1), (1, 5, 1), (3, 5, 5)],
)
def test_smallest_legal_group(num_ranks: int, num_microbatches: int, group: int) -> None:
    assert grouped("interleaved", num_ranks, num_microbatches).group == group


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "group"),
    [(4, 8, 4), (4, 6, 4), (4, 9, 5), (4, 3, 3), (4, 1, 1), (8, 12, 8), (8, 11, 11)],
)
def test_gis_also_takes_half_groups(num_ranks: int, num_microbatches: int, group: int) -> None:
    """The last group may be half as large as there are ranks."""
    assert grouped("gis", num_ranks, num_microbatches).group == group
    grouped("gis", num_ranks, num_microbatches).program()


def test_cells_of_a_group_pass_chunk_by_chunk() -> None:
    schedule = grouped("interleaved", 2, 5, 3)
    cells = schedule.forward_cells(rank=1, group_size=3)
    assert [microbatch for _, microbatch in cells] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [stage for stage, _ in cells] == [1, 1, 1, 3, 3, 3, 1, 1, 3, 3]
    assert [stage for stage, _ in schedule.backward_cells(rank=1, group_size=3)] == [3, 3, 3, 1, 1, 1, 3, 3, 1, 1]


@pytest.mark.parametrize(
    ("name", "group_size", "message"),
    [
        (
            "interleaved",
            4,
            "interleaved takes groups of N >= P microbatches, the last one (M % N, unless 0) too: got group_size=4 "
            "with 6 microbatches on 4 ranks; use group_size=6, or 4 or 8 microbatches",
        ),
        (
            "interleaved-zb",
            3,
            "interleaved-zb takes groups of N >= P microbatches, the last one (M % N, unless 0) too: got group_size=3 "
            "with 6 microbatches on 4 ranks; use group_size=6",
        ),
        (
            "gis",
            1,
            "gis takes groups of N >= P/2 microbatches, the last one (M % N, unless 0) too: got group_size=1 "
            "with 6 microbatches on 4 ranks; use group_size=2",
        ),
        (
            "gis",
            5,
            "gis takes groups of N >= P/2 microbatches, the last one (M % N, unless 0) too: got group_size=5 "
            "with 6 microbatches on 4 ranks; use group_size=4, or 5 or 7 microbatches",
        ),
    ],
)
def test_refusal_names_rule_numbers_and_nearest_shapes(name: str, group_size: int, message: str) -> None:
    with pytest.raises(ScheduleError) as refusal:
        grouped(name, 4, 6, group_size)
    assert str(refusal.value) == message


@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb", "gis"])
def test_the_remedies_of_a_refusal_are_served(name: str) -> None:
    """Whatever a refusal proposes is accepted: the group size, and each number of microbatches."""
    refused = 0
    for num_ranks in range(1, 6):
        for num_microbatches in range(1, 12):
            for group_size in range(1, 14):
                try:
                    grouped(name, num_ranks, num_microbatches, group_size)
                except ScheduleError as error:
                    refused += 1
                    size, _, counts = str(error).partition("; use group_size=")[2].partition(", or ")
                    grouped(name, num_ranks, num_microbatches, int(size))
                    for count in counts.removesuffix(" microbatches").split(" or ") if counts else []:
                        grouped(name, num_ranks, int(count), group_size)
    assert refused


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2"])
@pytest.mark.parametrize("option", ["num_chunks", "group_size"])
def test_counts_are_whole_numbers(option: str, value: object) -> None:
    with pytest.raises(ScheduleError, match=f"{option} is a whole number from 1 up: got {value!r}"):
        create("interleaved", num_ranks=2, num_microbatches=4, **{option: value})
