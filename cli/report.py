"""What a person sees of a run, and what is written to a file."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from stagewright.cli.metrics import Listener, MetricsError, Preempted, Silence, StepMetrics, TrainResult
from stagewright.cli.settings import TrainSettings
from stagewright.cli.tensorboard import open_curves
from stagewright.cli.trace_file import TraceFile
from stagewright.schedules import Schedule

NUM_LINES = 20


class Bar(Silence):
    """A live line for a terminal: step, loss, speed, time to go."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self.progress = progress
        self.task = task

    def step_done(self, metrics: StepMetrics) -> None:
        """Move the bar."""
        self.progress.update(
            self.task, completed=metrics.step, loss=f"{metrics.loss:.4f}", speed=metrics.tokens_per_second
        )


class Lines(Silence):
    """About twenty lines for a pipe or a file: the first step, the last, and some between."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self.console = console
        self.num_steps = num_steps
        self.seconds = 0.0
        self.num_done = 0

    def step_done(self, metrics: StepMetrics) -> None:
        """Print a line, if it is this step's turn."""
        self.seconds += metrics.step_seconds
        self.num_done += 1
        interval = max(self.num_steps // NUM_LINES, 1)
        if self.num_done > 1 and metrics.step != self.num_steps and metrics.step % interval:
            return
        seconds_left = self.seconds / self.num_done * (self.num_steps - metrics.step)
        self.console.print(
            f"step {metrics.step:>{len(str(self.num_steps))}}/{self.num_steps}  loss {metrics.loss:.4f}  "
            f"{metrics.tokens_per_second:.0f} tokens/s  {seconds_left:.0f} s to go",
            highlight=False,
            soft_wrap=True,
        )


class JsonLines(Silence):
    """One JSON object a step, and a last one for the run."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def step_done(self, metrics: StepMetrics) -> None:
        """Write `step`, `loss` (nats per byte), `tokens_per_second`, `step_seconds`, and `grad_norm` if it is known."""
        norm = {} if metrics.grad_norm is None else {"grad_norm": metrics.grad_norm}
        self._write(
            step=metrics.step,
            loss=metrics.loss,
            tokens_per_second=metrics.tokens_per_second,
            step_seconds=metrics.step_seconds,
            **norm,
        )

    def run_done(self, result: TrainResult) -> None:
        """Write `val_loss` (nats per byte), the same in bits beside the unigram model's, `version` (that of the weights
        that were validated), and the three bubbles."""
        bubble = result.bubble
        self._write(
            val_loss=result.validation_loss,
            version=result.version,
            val_bits_per_byte=result.validation_bits,
            unigram_bits_per_byte=result.unigram_bits,
            tokens_per_second=result.tokens_per_second,
            bubble={"formula": bubble.formula, "simulated": bubble.simulated, "measured": bubble.measured},
        )

    def _write(self, **values: object) -> None:
        try:
            self.file.write(json.dumps(values) + "\n")
            self.file.flush()
        except OSError as error:
            with suppress(OSError):  # what was not written is not written now either
                self.file.close()
            raise _unwritten(self.file.name, error) from error


class Together:
    """Several listeners as one."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.listeners = listeners

    def step_done(self, metrics: StepMetrics) -> None:
        """Tell all of them."""
        for listener in self.listeners:
            listener.step_done(metrics)

    def run_done(self, result: TrainResult) -> None:
        """Tell all of them."""
        for listener in self.listeners:
            listener.run_done(result)


@contextmanager
def open_report(settings: TrainSettings, console: Console) -> Iterator[Listener]:
    """Open what the settings ask for: a bar or lines unless quiet, metrics and curves if they are wanted."""
    with ExitStack() as stack:
        listeners: list[Listener] = []
        if settings.metrics is not None:
            listeners.append(JsonLines(stack.enter_context(open_metrics(settings))))
        if settings.tensorboard is not None:
            listeners.append(stack.enter_context(open_curves(settings.tensorboard)))
        if settings.trace is not None:
            listeners.append(TraceFile(settings.trace))
        if not settings.quiet and console.is_terminal:
            progress = stack.enter_context(make_progress(console))
            listeners.append(Bar(progress, progress.add_task("", total=settings.steps, loss="…", speed=0.0)))
        elif not settings.quiet:
            listeners.append(Lines(console, settings.steps))
        yield Together(listeners)


def open_metrics(settings: TrainSettings) -> TextIO:
    """Open the file to write metrics to, behind what is there if the run may go on from an earlier one.

    Raises MetricsError where that cannot be done.
    """
    path = settings.metrics
    assert path is not None, "nobody opens what is not wanted"
    try:
        return path.open("w" if settings.resume is None else "a", encoding="utf-8")
    except OSError as error:
        raise _unwritten(path, error) from error


def _unwritten(path: Path | str, error: OSError) -> MetricsError:
    return MetricsError(f"cannot write the metrics to {path}: {error.strerror or error}")


def make_progress(console: Console) -> Progress:
    """The columns of the live line."""
    return Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]:.0f} tokens/s"),
        TextColumn("to go"),
        TimeRemainingColumn(),
        console=console,
    )


def closing_table(settings: TrainSettings, result: TrainResult) -> Table:
    """Tabulate what the run achieved, with the unit of every figure."""
    schedule, bubble = settings.schedule, result.bubble
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    shape = f"{counted(schedule.num_ranks, 'rank')}, {counted(schedule.num_microbatches, 'microbatch')}"
    shape += "" if settings.dp == 1 else f", {settings.dp} replicas"
    table.add_row("schedule", schedule.name, shape)
    table.add_row("cut", Text(result.cut), "E embedding, t layer, L head and loss")
    table.add_row("training loss, first step", f"{result.first_loss:.4f}", "nats per byte")
    table.add_row("training loss, last step", f"{result.last_loss:.4f}", "nats per byte")
    table.add_row("validation loss", f"{result.validation_bits:.4f}", "bits per byte")
    table.add_row("weights validated", f"version {result.version}", which_version(schedule))
    table.add_row("unigram byte model", f"{result.unigram_bits:.4f}", "bits per byte, on the same files")
    if result.loss_scale is not None:
        table.add_row("loss scale", f"{result.loss_scale:.0f}", "at the end; an overflow halves it")
    table.add_row("speed", f"{result.tokens_per_second:.0f}", "tokens/s")
    table.add_row("bubble fraction", "", bubble.denominator)
    if bubble.formula is not None:
        table.add_row("bubble, formula", share(bubble.formula), f"idle = {bubble.formula_text}")
    table.add_row("bubble, simulated", share(bubble.simulated), "from the measured mean durations")
    table.add_row("bubble, measured", share(bubble.measured), "median of the last steps")
    return table


def share(fraction: float) -> str:
    """A fraction to four digits; what rounding has left a hair below nothing is nothing."""
    return f"{round(fraction, 4) + 0.0:.4f}"


def counted(number: int, noun: str) -> str:
    """A number of things: 1 batch, 2 batches."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def which_version(schedule: Schedule) -> str:
    """What is to be known about the weight version that a run ends with."""
    if schedule.synchronous:
        return "the newest"
    staleness = schedule.update_rule.max_staleness
    return f"gradients up to {counted(staleness, 'update')} old"


def print_result(settings: TrainSettings, result: TrainResult | Preempted, console: Console) -> None:
    """Print the closing table, and below it each prompt with what the model wrote after it; of a run that was told to
    end before its time, only how to go on."""
    if isinstance(result, Preempted):
        console.print(
            f"ended by SIGTERM after step {result.num_updates} of {settings.steps}, and saved to {settings.save}: the "
            "same command with --resume goes on from there",
            highlight=False,
            soft_wrap=True,
        )
        return
    console.print(closing_table(settings, result))
    for prompt, continuation in zip(settings.sample, result.continuations):
        given = readable(prompt.encode("utf-8", "surrogateescape"), console.encoding)
        # A Text, unlike a string, keeps what looks like markup or an :emoji: as it is.
        console.print(Text.assemble("\n", (given, "bold"), readable(continuation, console.encoding)), soft_wrap=True)


def readable(text: bytes, encoding: str) -> str:
    """The text as a terminal may show it: a replacement character for what is not UTF-8, and for control characters.

    What the terminal's encoding lacks becomes a question mark.
    """
    decoded = text.decode("utf-8", "replace").replace("\r\n", "\n")
    shown = "".join(
        character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for character in decoded
    )
    return shown.encode(encoding, "replace").decode(encoding)
