"""Windowed: training without a flush, one window of an asynchronous schedule a batch."""

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
        self._assembly = assembly
        self._transport = assembly.transport
        self._session = Session(fixed_shapes, windows.schedule.num_microbatches)
        self._mail = Mail(sample, assembly.transport)
        self._executors: dict[tuple[str, int, int], Executor] = {}
        self.num_batches = 0
        self.num_drained = 0

    @property
    def _updates_per_batch(self) -> int:
        return self._windows.schedule.num_microbatches // self._windows.schedule.microbatches_per_update

    def program(self, *, updates: bool = True) -> Program:
        """Some batches and the drain after them."""
        return self._windows.program((self._windows.num_opening,))

    @property
    def microbatches_per_update(self) -> int:
        """Microbatches whose gradients go into one update."""
        return self._windows.schedule.microbatches_per_update

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
        """
        if not updates:
            raise ScheduleError(
                f"{self._windows.schedule.name} never stops between batches, so there is no moment at which a batch's "
                "gradients could be handed out: call train_step, or take a synchronous schedule"
            )
        first_update = 1 + self.num_batches * self._updates_per_batch
        self._assembly.updater.plan(range(first_update, first_update + self._updates_per_batch))
        if not self.in_flight:
            self._transport.begin(self._session)
        piece = self._windows.window(self.num_batches, self.num_drained)
        program = self._run(piece, run)
        self.num_batches += 1
        return program

    def drain(self, step: int) -> None:
        """Do the backwards and updates that are left."""
        if not self.in_flight:
            return
        self._run(self._windows.drain(self.num_batches, self.num_drained), Run(step, (), (), None, train=True))
        self._transport.end()
        self.num_drained = self.num_batches
        assert self._mail.is_empty, "a drained pipeline has nothing in flight"

    def _run(self, piece: Piece, run: Run) -> Program:
        executor = self._executors.get(piece.name)
        if executor is None:
            executor = self._executors[piece.name] = Executor(self._program_of(piece), self._assembly, mail=self._mail)
        run.first = self.num_batches * self._windows.schedule.num_microbatches
        run.later_microbatches, run.later_versions = piece.microbatches, piece.versions
        executor.run(run)
        return executor.program

    def _program_of(self, piece: Piece) -> Program:
        """A piece as a program of its own, with numbers as they stand in it."""
        schedule = self._windows.schedule
        num_batches = 2 * (self._windows.num_opening + 2)
        return Program(
            piece.streams, schedule.placement, schedule.num_microbatches, num_batches, self._windows.update_rule
        )
