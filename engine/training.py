"""Training: what runs one batch after the other, with a flush between them or without."""

from typing import TypeAlias

from stagewright.engine.assembly import Assembly
from stagewright.engine.plan import windows_of
from stagewright.engine.synchronous import SynchronousTraining
from stagewright.engine.windowed import WindowedTraining
from stagewright.schedules import Program
from stagewright.schedules.asynchronous import AsynchronousSchedule

Training: TypeAlias = SynchronousTraining | WindowedTraining


def training_of(
    program: Program,
    asynchronous: AsynchronousSchedule | None,
    assembly: Assembly,
    *,
    scalars: bool,
    fixed_shapes: bool,
) -> Training:
    """What trains by a program, or by a schedule without a flush.

    Args:
        program: of one batch.
        asynchronous: the schedule, where it goes on from batch to batch.
        assembly: the parts of this rank.
        scalars: whether an update is known to need values of all ranks.
        fixed_shapes: a batch has the shapes of the one before.

    Raises:
        ScheduleError: the schedule's updates cannot have what they need.
    """
    if asynchronous is None:
        return SynchronousTraining(program, assembly, fixed_shapes=fixed_shapes)
    data_parallel = assembly.group.size > 1
    windows = windows_of(asynchronous, assembly.ties.stages, scalars=scalars, data_parallel=data_parallel)
    return WindowedTraining(windows, assembly, fixed_shapes=fixed_shapes)
