"""The file that `stagewright train --trace` writes and `stagewright explain` reads."""

from pathlib import Path

from stagewright.cli.metrics import MetricsError, Silence, TrainResult


class TraceFile(Silence):
    """Writes the recorded steps of a run once it is done.

    Args:
        path: where to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def run_done(self, result: TrainResult) -> None:
        """Write them. Raises MetricsError where that cannot be done."""
        if result.recording is None:
            return
        try:
            self.path.write_text(result.recording.to_json(), encoding="utf-8", newline="\n")
        except OSError as error:
            raise MetricsError(f"cannot write the trace to {self.path}: {error.strerror or error}") from error


def check_trace(path: Path) -> None:
    """Find out whether a trace can be written there, and leave what is there as it is. Raises MetricsError."""
    try:
        path.open("a").close()
    except OSError as error:
        raise MetricsError(f"cannot write the trace to {path}: {error.strerror or error}") from error
