"""Size: what can be drawn and tabulated before the user would rather have been asked."""

from typing import Final

from stagewright.schedules import ScheduleError

# Computations of all ranks; a million take some seconds and a gigabyte.
MOST: Final = 4_000_000


def check_size(num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    """Refuse a shape whose computations would fill the memory.

    Raises:
        ScheduleError: there are too many.
    """
    count = 2 * num_ranks * num_chunks * num_microbatches
    if count > MOST:
        raise ScheduleError(
            f"{num_ranks} ranks, {num_chunks} chunk(s) and {num_microbatches} microbatches are {count} computations: "
            f"take a smaller shape, of at most {MOST}"
        )
