"""What a run tells about itself."""

import math
from dataclasses import dataclass
from typing import Protocol

from stagewright.cli.bubble import Bubble
from stagewright.schedules.recording import Recording


@dataclass(frozen=True)
class StepMetrics:
    """What one step did: `step` counts from 1, `loss` is in nats per byte.

    `grad_norm` is that of all stages together before clipping, in the latest update; None where nobody asked for it.
    """

    step: int
    loss: float
    tokens_per_second: float
    step_seconds: float
    grad_norm: float | None = None


@dataclass(frozen=True)
class TrainResult:
    """What the whole run did. Losses are in nats per byte, unless they are called bits.

    `version` is the weight version that was validated, `cut` says which layers each stage had, `loss_scale` is that of
    float16 at the end; `recording` has the last steps, if they were to be traced; `continuations` are what the model
    wrote after each prompt.
    """

    first_loss: float
    last_loss: float
    validation_loss: float
    version: int
    unigram_bits: float
    tokens_per_second: float
    bubble: Bubble
    cut: str = ""
    loss_scale: float | None = None
    recording: Recording | None = None
    continuations: tuple[bytes, ...] = ()

    @property
    def validation_bits(self) -> float:
        """The validation loss in bits per byte."""
        return self.validation_loss / math.log(2)


@dataclass(frozen=True)
class Preempted:
    """A run that was told to end before its time, and has been saved after so many updates."""

    num_updates: int


class Listener(Protocol):
    """Is told what happens while a model trains."""

    def step_done(self, metrics: StepMetrics) -> None:
        """Hear of one step."""

    def run_done(self, result: TrainResult) -> None:
        """Hear of the whole run."""


class Silence:
    """A listener that says nothing."""

    def step_done(self, metrics: StepMetrics) -> None:
        """Say nothing."""

    def run_done(self, result: TrainResult) -> None:
        """Say nothing."""


class MetricsError(ValueError):
    """What a run tells about itself cannot be written."""
