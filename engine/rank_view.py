"""Rank view: what one rank of a pipeline says of itself."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from stagewright.engine.assembly import Assembly
from stagewright.engine.launch.context import RankContext, context_of
from stagewright.engine.timing.calibration import calibrate
from stagewright.engine.timing.trace import NUM_KEPT, History
from stagewright.engine.updates.optimizers import named_weights
from stagewright.schedules import Costs, Timeline


class RankView:
    """The parts of one rank that a trainer may look at: also how many steps were made, and the last one's metrics.

    Args:
        assembly: all of them.
    """

    _num_microbatches: int

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._transport = assembly.transport
        self._group = assembly.group
        self._stages = assembly.stages
        self._updater = assembly.updater
        self._history = History(assembly.transport)
        self.num_steps = 0
        self.metrics: dict[str, Tensor] = {}

    @property
    def rank(self) -> int:
        """This rank, among those of its pipeline."""
        return self._transport.rank

    @property
    def context(self) -> RankContext:
        """This rank among those of its pipeline, with what connects these; under data parallelism not those of all."""
        return context_of(self._transport)

    @property
    def replica(self) -> int:
        """Which replica of the pipeline this rank belongs to, under data parallelism; else 0."""
        return self._group.rank

    @property
    def num_replicas(self) -> int:
        """Replicas of the pipeline; 1 without data parallelism."""
        return self._group.size

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one batch; another number takes another Pipeline."""
        return self._num_microbatches

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer of this rank's parameters; one without any where it has none, None where the trainer steps."""
        return self._updater.optimizer

    @property
    def modules(self) -> dict[int, nn.Module]:
        """This rank's modules by stage."""
        return {index: stage.module for index, stage in self._stages.items()}

    @property
    def grad_norm(self) -> float | None:
        """The norm of all stages' gradients in the last update, before clipping; None where nothing asked for it.

        Without a flush between batches that update may be of an earlier batch than the last one.
        """
        return self._updater.grad_norm

    @property
    def overflowed(self) -> bool:
        """Whether the gradients of the last batch overflowed on any rank, so that they were dropped on all.

        With a ``loss_scale`` only. ``train_step`` has left weights and optimizer as they were. ``forward_backward`` has
        added nothing to ``.grad``: a trainer that steps by itself drops what it had accumulated, or repeats the batch.
        """
        return self._updater.overflowed

    @property
    def skipped(self) -> bool:
        """Whether a loss of the last update was NaN or infinite, so that its gradients were dropped on all ranks.

        With ``on_nan="skip"`` only. Without a flush between batches that update may be of an earlier batch.
        """
        return self._updater.skipped

    @property
    def loss_scale(self) -> float:
        """By what losses are multiplied now."""
        return self._updater.scale

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of what this rank trains; a name of several stages gets its stage in front."""
        return iter(named_weights(self._assembly.weights))

    def trace(self) -> Timeline:
        """When each instruction of the last training step ran, on all ranks, in seconds; every rank calls this alike.

        Where there is no flush, microbatches and versions have the numbers of an early batch.

        Raises:
            ValueError: there was no training step yet.
        """
        return self.timelines(1)[-1]

    def timelines(self, num_steps: int = NUM_KEPT) -> list[Timeline]:
        """The same of the last training steps, oldest first, up to ten; the very first only where it is alone."""
        return self._history.timelines(num_steps)

    def calibrate(self, num_steps: int = NUM_KEPT) -> Costs:
        """What each stage and each hop took in the last training steps, for the simulator; in seconds and bytes.

        ``simulate(pipe.program, pipe.calibrate())`` predicts the next one. Up to ten steps count, and the first of all
        only where there is no other; every rank calls this alike.

        Args:
            num_steps: so many of them at most.

        Raises:
            ValueError: there was no training step yet.
        """
        return calibrate(self._history, self._transport, num_steps)
