"""What one training run is made of; small enough to be sent to every rank."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from stagewright.schedules import Schedule

DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
OPTIMIZERS: Final = ("adamw", "muon", "sgd")


@dataclass(frozen=True)
class TrainSettings:
    """The settings of `stagewright train`, each under the name of its flag."""

    schedule: Schedule
    data: Path | None = None
    sequence: int = 128
    batch_size: int = 16
    dp: int = 1
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    dropout: float = 0.0
    tie: bool = False
    cut: str = "even"
    profile: Path | None = None
    steps: int = 400
    optimizer: str = "adamw"
    lr: float = 1e-3
    clip: float | None = None
    accumulate: int = 1
    on_nan: Literal["raise", "skip"] | None = None
    dtype: str = "float32"
    recompute: Literal["off", "full"] | int = "off"
    seed: int = 0
    sample: tuple[str, ...] = ()
    sample_bytes: int = 200
    temperature: float = 0.8
    save: Path | None = None
    save_every: int | None = None
    save_async: bool = False
    save_on_sigterm: bool = False
    keep: int | None = None
    resume: Path | Literal[True] | None = None
    timeout: float | None = None
    metrics: Path | None = None
    tensorboard: Path | None = None
    trace: Path | None = None
    quiet: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Bytes predicted for one update."""
        return self.accumulate * self.batch_size * self.sequence

    @property
    def ties_stages(self) -> bool:
        """Whether stages share a weight; a single one has it once by itself."""
        return self.tie and self.schedule.num_stages > 1

    @property
    def reporter(self) -> int:
        """The rank that reports: of the first replica the first one that has the last stage, and so the loss.

        No other need wait for the loss, which would take from an asynchronous schedule what it is for.
        """
        return self.dp * self.schedule.placement.replicas_of(self.schedule.num_stages - 1)[0]

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas together."""
        return self.dp * self.schedule.num_ranks

    @property
    def version(self) -> int:
        """The weight version that all updates together make."""
        return self.steps * self.schedule.num_units // self.schedule.update_rule.microbatches_per_update
