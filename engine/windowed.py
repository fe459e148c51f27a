"""Windowed: training without a flush, one window of an asynchronous schedule a batch."""

from collections.abc import Mapping

from stagewright.engine.executor import Executor
from stagewright.engine.gradients import Gradients
from stagewright.engine.mail import Mail
from stagewright.engine.randomness import Seeds
from stagewright.engine.run import Run
from stagewright.engine.stage import Stage
from stagewright.engine.transport.contract import Session, Transport
from stagewright.engine.updater import Updater
from stagewright.schedules import Program
from stagewright.schedules.windows import NUM_OPENING, Piece, Windows

# Batches of the program that tells the channels: enough for every kind of window, and a drain in between.
_SAMPLE = (NUM_OPENING + 2, 2 * NUM_OPENING + 4)


class WindowedTraining:
    """Runs the pieces of an asynchronous schedule; what is in flight stays so from one to the next.

    Args:
        windows: the schedule, cut.
        stages, transport, gradients, updater, seeds: as for an Executor.
        fixed_shapes: a batch has the shapes of the one before.
    """

    def __init__(
        self,
        windows: Windows,
        stages: Mapping[int, Stage],
        transport: Transport,
        gradients: Gradients,
        updater: Updater,
        seeds: Seeds,
        *,
        fixed_shapes: bool,
    ) -> None:
        self._windows = windows
        self._parts = (stages, transport, gradients, updater, seeds)
        self._transport = transport
        self._session = Session(fixed_shapes)
        self._mail = Mail(windows.program(_SAMPLE), transport)
        self._executors: dict[tuple[str, int, int], Executor] = {}
        self.num_batches = 0
        self.num_drained = 0

    @property
    def in_flight(self) -> bool:
        """Whether a drain would have anything to do."""
        return self.num_batches > self.num_drained

    def train(self, run: Run) -> Program:
        """Run the window of the next batch, and give the program that it was."""
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
            executor = self._executors[piece.name] = Executor(
                self._program_of(piece), *self._parts, mail=self._mail
            )
        run.first = self.num_batches * self._windows.schedule.num_microbatches
        run.later_microbatches, run.later_versions = piece.microbatches, piece.versions
        executor.run(run)
        return executor.program

    def _program_of(self, piece: Piece) -> Program:
        """A piece as a program of its own, with numbers as they stand in it."""
        schedule = self._windows.schedule
        num_batches = 2 * (NUM_OPENING + 2)
        return Program(
            piece.streams, schedule.placement, schedule.num_microbatches, num_batches, self._windows.update_rule
        )
