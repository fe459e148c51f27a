"""What one training run is made of; small enough to be sent to every rank."""

from dataclasses import dataclass
from pathlib import Path

from stagewright.schedules import Schedule


@dataclass(frozen=True)
class TrainSettings:
    """The settings of `stagewright train`, each under the name of its flag."""

    schedule: Schedule
    data: Path | None = None
    sequence: int = 128
    batch_size: int = 16
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    dropout: float = 0.0
    steps: int = 400
    lr: float = 1e-3
    seed: int = 0
    sample: tuple[str, ...] = ()
    sample_bytes: int = 200
    temperature: float = 0.8
    metrics: Path | None = None
    quiet: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Bytes predicted in one step."""
        return self.batch_size * self.sequence
