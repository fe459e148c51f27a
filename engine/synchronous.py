"""Synchronous: training by programs that end with their batch."""

from collections.abc import Mapping
from typing import Any

from stagewright.engine.assembly import Assembly
from stagewright.engine.executor import Executor
from stagewright.engine.run import Run
from stagewright.engine.transport.contract import Session
from stagewright.schedules import Program, insert_agreements
from stagewright.schedules.data_parallel import insert_reductions
from stagewright.schedules.sharding import insert_sharding
from stagewright.schedules.variants import without_steps


class SynchronousTraining:
    """Runs a program once a batch, with its update or without.

    Args:
        program: of one batch.
        assembly: the parts of this rank.
        fixed_shapes: a batch has the shapes of the one before.
    """

    def __init__(self, program: Program, assembly: Assembly, *, fixed_shapes: bool) -> None:
        program = insert_reductions(program) if assembly.group.size > 1 else program
        self._program = insert_sharding(program, assembly.sharded_stages)
        self._assembly = assembly
        self._session = Session(fixed_shapes)
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
        key = (updates, self._assembly.updater.needs_scalars)
        if key not in self._executors:
            self._executors[key] = Executor(self._made(*key), self._assembly, session=self._session)
        self._executors[key].run(run)
        return self._executors[key].program

    def program(self, *, updates: bool = True) -> Program:
        """The program of the next batch."""
        return self._made(updates, self._assembly.updater.needs_scalars)

    def drain(self, step: int) -> None:
        """Nothing is in flight between batches."""

    def settle(self, step: int) -> None:
        """Nothing is in flight, even after a failure."""

    def refuse_to_stop(self) -> None:
        """Gradients lie ready after every batch."""

    def state_dict(self) -> dict[str, Any]:
        """Batches do not depend on each other."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to go on with."""

    def _made(self, updates: bool, scalars: bool) -> Program:
        """What an update needs of all ranks goes into the program; the first batch finds out about the loss."""
        program = insert_agreements(self._program, tied_stages=self._assembly.ties.stages, scalars=scalars)
        return program if updates else without_steps(program)
