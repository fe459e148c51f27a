"""Synchronous: training by programs that end with their batch."""

from stagewright.engine.assembly import Assembly
from stagewright.engine.executor import Executor
from stagewright.engine.run import Run
from stagewright.schedules import Program, insert_agreements
from stagewright.schedules.variants import without_steps


class SynchronousTraining:
    """Runs a program once a batch, with its update or without.

    Args:
        program: of one batch.
        assembly: the parts of this rank.
        fixed_shapes: a batch has the shapes of the one before.
    """

    def __init__(self, program: Program, assembly: Assembly, *, fixed_shapes: bool) -> None:
        self._program = program
        self._assembly = assembly
        self._fixed_shapes = fixed_shapes
        self._executors: dict[tuple[bool, bool], Executor] = {}

    @property
    def microbatches_per_update(self) -> int:
        """All of the batch."""
        return self._program.num_microbatches

    @property
    def allows_counts(self) -> bool:
        """The first batch finds out whether the loss comes as (sum, count)."""
        return True

    def train(self, run: Run, *, updates: bool) -> Program:
        """Run one batch, and give the program that did it."""
        executor = self._executor(updates, self._assembly.updater.needs_scalars)
        executor.run(run)
        return executor.program

    def program(self, *, updates: bool = True) -> Program:
        """The program of the next batch."""
        return self._executor(updates, self._assembly.updater.needs_scalars).program

    def drain(self, step: int) -> None:
        """Nothing is in flight between batches."""

    def _executor(self, updates: bool, scalars: bool) -> Executor:
        """What an update needs of all ranks goes into the program; the first batch finds out about the loss."""
        executor = self._executors.get((updates, scalars))
        if executor is None:
            tied_stages = self._assembly.ties.stages
            program = insert_agreements(self._program, tied_stages=tied_stages, scalars=scalars)
            program = program if updates else without_steps(program)
            executor = Executor(program, self._assembly, fixed_shapes=self._fixed_shapes)
            self._executors[updates, scalars] = executor
        return executor
