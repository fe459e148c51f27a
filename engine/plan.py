"""Plan: from what the user asks for to the program that the engine runs."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from stagewright.schedules import Program, Schedule, ScheduleError, complete, create, verify
from stagewright.schedules.asynchronous import AsynchronousSchedule
from stagewright.schedules.instructions import InputGradient
from stagewright.schedules.windows import Windows

Recompute: TypeAlias = Literal["off", "full"] | int
OnNan: TypeAlias = Literal["raise", "skip"]


def plan_of(
    schedule: str | Schedule | Program, num_ranks: int, num_microbatches: int | None, options: Mapping[str, Any]
) -> tuple[Program, AsynchronousSchedule | None]:
    """The verified program of a schedule by name, of a Schedule, or of a Program that came from elsewhere; and the
    schedule itself, where it goes on from batch to batch.

    Raises:
        ScheduleError: the schedule cannot serve the shape, cannot be run, or the program is illegal.
        ValueError: arguments contradict each other.
    """
    if isinstance(schedule, str):
        if num_microbatches is None:
            raise ValueError(f"a schedule by name needs a shape: give num_microbatches beside schedule={schedule!r}")
        schedule = create(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    elif options:
        raise ValueError(f"a {type(schedule).__name__} has its options already: {sorted(options)} belong to it")
    elif num_microbatches not in (None, schedule.num_microbatches):
        raise ValueError(
            f"the schedule has {schedule.num_microbatches} microbatches, not num_microbatches={num_microbatches}"
        )
    if schedule.num_ranks != num_ranks:
        raise ScheduleError(f"the schedule is for {schedule.num_ranks} ranks, but the transport connects {num_ranks}")
    if isinstance(schedule, Program):
        program = complete(schedule)
        verify(program)
    else:
        if not schedule.runnable:
            raise ScheduleError(f"the engine cannot run {schedule.name}: {schedule.refusal}")
        program = schedule.program()
        if isinstance(schedule, AsynchronousSchedule):
            return program, schedule
    if program.updates.max_staleness or program.num_batches > 1:
        raise ScheduleError(
            "a program from elsewhere ends with the update of its one batch: this one goes on beyond it; give the "
            "Schedule that it was made by"
        )
    return program, None


def windows_of(
    schedule: AsynchronousSchedule, tied_stages: frozenset[int], *, scalars: bool, data_parallel: bool = False
) -> Windows:
    """The windows of an asynchronous schedule, with what its updates need of other ranks.

    Raises:
        ScheduleError: an update after every microbatch would need values of all ranks.
    """
    rule = schedule.update_rule
    together = rule.microbatches_per_update == schedule.num_microbatches and len(set(rule.num_versions)) == 1
    if (scalars or tied_stages) and not together:
        raise ScheduleError(
            f"{schedule.name} updates each stage by itself after every microbatch, each with another delay: gradient "
            "norms, loss scales, counts, on_nan and tied weights, which belong to one update of all stages, need 2bw "
            "or a synchronous schedule"
        )
    return Windows(schedule, tied_stages, scalars, data_parallel)


def splits_backward(program: Program) -> bool:
    """Whether any backward of the program comes in two halves."""
    return any(isinstance(instruction, InputGradient) for stream in program.streams for instruction in stream)


def kept_microbatches(recompute: Recompute | Mapping[int, Recompute], stage: int) -> int | None:
    """How many of a batch's last microbatches keep their activations on a stage; None for all.

    Raises:
        ValueError: this is no way to recompute.
    """
    wanted = recompute.get(stage, "off") if isinstance(recompute, Mapping) else recompute
    if wanted == "off":
        return None
    if wanted == "full":
        return 0
    if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0:
        return wanted
    raise ValueError(f"recompute is 'off', 'full' or the number of last microbatches to keep: got {wanted!r}")
