"""Curves for TensorBoard, written on the rank that has the loss: nothing has to be sent there."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.cli.metrics import MetricsError, Silence, StepMetrics, TrainResult

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Curves(Silence):
    """What a run tells, as scalars over its steps.

    Args:
        writer: what writes them.
    """

    def __init__(self, writer: "SummaryWriter") -> None:
        self._writer = writer
        self._num_steps = 0

    def step_done(self, metrics: StepMetrics) -> None:
        """Add a point to each curve: `loss` (nats per byte), `tokens per second`, `gradient norm` if it is known."""
        self._num_steps = metrics.step
        self._add("loss", metrics.loss)
        self._add("tokens per second", metrics.tokens_per_second)
        if metrics.grad_norm is not None:
            self._add("gradient norm", metrics.grad_norm)

    def run_done(self, result: TrainResult) -> None:
        """Write `validation loss` (nats per byte) and `bubble fraction` (measured) at the last step."""
        self._add("validation loss", result.validation_loss)
        self._add("bubble fraction", result.bubble.measured)

    def _add(self, name: str, value: float) -> None:
        self._writer.add_scalar(name, value, self._num_steps)


@contextmanager
def open_curves(folder: Path) -> Iterator[Curves]:
    """Write curves to a folder until the block ends."""
    writer = import_writer()(str(folder))
    try:
        yield Curves(writer)
    finally:
        writer.close()


def import_writer() -> "type[SummaryWriter]":
    """torch's own writer. Raises ValueError where the package is missing that it writes with."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            f"--tensorboard needs the package tensorboard ({error}): pip install 'stagewright[tensorboard]'"
        ) from error
    return SummaryWriter


def make_folder(folder: Path) -> None:
    """Make the folder of the curves. Raises MetricsError where that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MetricsError(f"cannot write curves to {folder}: {error.strerror or error}") from error
