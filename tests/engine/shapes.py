"""Every schedule that the engine runs, at the shapes it serves."""

from collections.abc import Iterator, Sequence

from stagewright.schedules import Schedule, ScheduleError, create, find, names

# How the stages of a rank are chosen, for the schedules that leave a choice.
_STAGES_PER_RANK = ("num_chunks", "num_waves")


def synchronous_names() -> list[str]:
    """The schedules that end a batch with its update, and that the engine can run."""
    return [name for name in names() if find(name).synchronous and find(name).runnable]


def schedules_of(name: str, num_ranks: Sequence[int], num_microbatches: Sequence[int]) -> Iterator[Schedule]:
    """One schedule at every shape that it serves, with one to three chunks where one can choose."""
    fields = find(name).__dataclass_fields__
    option = next((option for option in _STAGES_PER_RANK if option in fields), None)
    for ranks in num_ranks:
        for microbatches in num_microbatches:
            for chunks in (1, 2, 3) if option else (1,):
                options = {option: chunks} if option else {}
                try:
                    yield create(name, num_ranks=ranks, num_microbatches=microbatches, **options)
                except ScheduleError:
                    continue


def label(schedule: Schedule) -> str:
    """A schedule as the name of a test case."""
    shape = f"P{schedule.num_ranks}-V{schedule.placement.num_chunks}-M{schedule.num_microbatches}"
    return f"{schedule.name}-{shape}"


def rows_of(schedule: Schedule) -> int:
    """Rows that do not divide evenly by the microbatches, where there are two or more."""
    return 2 * schedule.num_microbatches + (1 if schedule.num_microbatches > 1 else 0)
