"""Windowed: training without a flush, one window of an asynchronous schedule a batch."""

from collections.abc import Mapping
from typing import Any

from stagewright.engine.assembly import Assembly
from stagewright.engine.executor import Executor
from stagewright.engine.mail import Mail
from stagewright.engine.run import Run
from stagewright.engine.transport.contract import Session
from stagewright.schedules import Program, ScheduleError, verify
from stagewright.schedules.windows import Piece, Windows


class WindowedTraining:
    """Runs the pieces of an asynchronous schedule; what is in flight stays so from one to the next.

    Args:
        windows: the schedule, cut.
        assembly: the parts of this rank.
        fixed_shapes: a batch has the shapes of the one before.
    """

    def __init__(self, windows: Windows, assembly: Assembly, *, fixed_shapes: bool) -> None:
        # Enough for every kind of window, and a drain in between.
        sample = windows.program((windows.num_opening + 2, 2 * windows.num_opening + 4))
        verify(sample)
        self._windows = windows
        self._schedule = windows.schedule
        self._assembly = assembly
        self._transport = assembly.transport
        self._session = Session(fixed_shapes, num_microbatches=windows.schedule.num_microbatches)
        self._mail = Mail(sample, assembly.transport)
        self._executors: dict[tuple[str, int, int], Executor] = {}
        self._has_failed = False
        self.num_batches = 0
        self.num_drained = 0

    @property
    def _updates_per_batch(self) -> int:
        return self._schedule.num_microbatches // self._schedule.microbatches_per_update

    def program(self, *, updates: bool = True) -> Program:
        """Some batches and the drain after them."""
        return self._windows.program((self._windows.num_opening,))

    @property
    def microbatches_per_update(self) -> int:
        """Microbatches whose gradients go into one update."""
        return self._schedule.microbatches_per_update

    @property
    def allows_counts(self) -> bool:
        """Whether the windows have the scalars that the division by a count needs."""
        return self._windows.scalars

    @property
    def in_flight(self) -> bool:
        """Whether a drain would have anything to do."""
        return self.num_batches > self.num_drained

    def train(self, run: Run, *, updates: bool) -> Program:
        """Run the window of the next batch, and give the program that it was.

        Raises:
            ScheduleError: gradients without their update are asked for.
            RuntimeError: an earlier batch has failed.
        """
        if not updates:
            self.refuse_to_stop()
        self._refuse_after_failure()
        self._transport.begin_batch()
        first_update = 1 + self.num_batches * self._updates_per_batch
        self._assembly.updater.plan(range(first_update, first_update + self._updates_per_batch))
        if not self.in_flight:
            self._transport.begin(self._session)
        program = self._run(self._windows.window(self.num_batches, self.num_drained), run)
        self.num_batches += 1
        return program

    def drain(self, step: int) -> None:
        """Do the backwards and updates that are left, and let the modules hold the newest version.

        Raises:
            RuntimeError: a batch has failed.
        """
        self._refuse_after_failure()
        if not self.in_flight:
            return
        self._transport.drain()
        piece = self._windows.drain(self.num_batches, self.num_drained)
        with self._assembly.norms.repeating():
            self._run(piece, Run(step, (), (), None, train=True))
        self._transport.end()
        self.num_drained = self.num_batches
        for weights in self._assembly.weights.values():
            weights.use(None)
        assert self._mail.is_empty, "a drained pipeline has nothing in flight"

    def settle(self, step: int) -> None:
        """Drain, or after a failure forget what is in flight."""
        if not self._has_failed:
            self.drain(step)
        self._mail.clear()
        self._has_failed = False

    def refuse_to_stop(self) -> None:
        """There is no moment at which gradients of one batch lie ready.

        Raises:
            ScheduleError: always.
        """
        raise ScheduleError(
            f"{self._schedule.name} never stops between batches, so there is no moment at which a batch's gradients "
            "could be handed out: call train_step, with max_norm=… to clip them, or take a synchronous schedule"
        )

    def state_dict(self) -> dict[str, Any]:
        """How far the schedule has come, and the older versions that it will still read; nothing may be in flight."""
        assert not self.in_flight, "what is in flight cannot be kept"
        older = {stage: weights.older_versions() for stage, weights in self._assembly.weights.items()}
        return {"schedule": self._rule, "num_batches": self.num_batches, "older_versions": older}

    @property
    def _rule(self) -> str:
        """What another training must have in common to go on with these versions.

        With one update a batch all stages keep the same versions, however many there are and wherever they live; with
        more, what is kept depends on the stage and its shape.
        """
        return self._schedule.name if self._updates_per_batch == 1 else repr(self._schedule)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``; the modules have loaded the newest version.

        The state of another schedule, or of pipedream in another shape, tells the weights and no more: then the rule of
        versions starts anew.
        """
        goes_on = state.get("schedule") == self._rule
        self.num_batches = self.num_drained = state["num_batches"] if goes_on else 0
        newest = self.num_batches * self._updates_per_batch
        for stage, weights in self._assembly.weights.items():
            weights.renumber(newest, state["older_versions"][stage] if goes_on else {})
        self._assembly.updater.resume(newest)

    def _run(self, piece: Piece, run: Run) -> Program:
        executor = self._executors.get(piece.name)
        if executor is None:
            executor = self._executors[piece.name] = Executor(self._program_of(piece), self._assembly, mail=self._mail)
        run.first = self.num_batches * self._schedule.num_microbatches
        run.later_microbatches, run.later_versions = piece.microbatches, piece.versions
        try:
            executor.run(run)
        except BaseException:
            self._has_failed = True
            raise
        return executor.program

    def _refuse_after_failure(self) -> None:
        if self._has_failed:
            raise RuntimeError(
                f"a batch has failed, and with it all that {self._schedule.name} had in flight: load a state that was "
                "saved before"
            )

    def _program_of(self, piece: Piece) -> Program:
        """A piece as a program of its own, with numbers as they stand in it."""
        schedule = self._schedule
        num_batches = 2 * (self._windows.num_opening + 2)
        return Program(
            piece.streams, schedule.placement, schedule.num_microbatches, num_batches, self._windows.update_rule
        )
