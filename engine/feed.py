"""Feed: what one rank takes of a batch, cut into microbatches."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from stagewright.engine.assembly import Assembly
from stagewright.engine.batch import split, split_keywords
from stagewright.engine.errors import described
from stagewright.engine.loss import BatchLoss, LossFunction
from stagewright.engine.run import Run
from stagewright.engine.training import Training
from stagewright.engine.value import Value


class Feed:
    """Makes runs of batches.

    Where one cannot be made, the ranks that would wait for it are told.

    Args:
        assembly: the parts of this rank.
        num_stages: of the model.
        loss_fn: of one microbatch.
        split_spec: keyword argument -> the dimension to cut.
        training: says how many microbatches go into one update, and whether a loss may come as (sum, count).
    """

    def __init__(
        self,
        assembly: Assembly,
        num_stages: int,
        loss_fn: LossFunction | None,
        split_spec: Mapping[str, int | None],
        training: Training,
    ) -> None:
        self._transport = assembly.transport
        self._group = assembly.group
        self._rank = assembly.transport.rank
        self._owns_first = 0 in assembly.stages
        self._owns_last = num_stages - 1 in assembly.stages
        self._loss_fn = loss_fn
        self._split_spec = split_spec
        self._training = training

    def loss(self, x: Value, y: Value, num_microbatches: int) -> BatchLoss:
        """The loss of a batch, still empty.

        Raises:
            ValueError: nobody has said what the loss is, or the target cannot be cut.
        """
        if self._loss_fn is None:
            raise ValueError("training and evaluation need a loss: give the Pipeline a loss_fn")
        with self._telling():
            targets = split(y if self._owns_last else None, num_microbatches, "y")
            inputs = split(x if self._owns_last and y is None else None, num_microbatches, "x")
        return BatchLoss(
            self._loss_fn,
            targets,
            inputs,
            per_update=self._training.microbatches_per_update,
            allows_counts=self._training.allows_counts,
            group=self._group if self._owns_last else None,
        )

    def run(
        self,
        step: int,
        x: Value,
        keywords: Mapping[str, Value],
        num_microbatches: int,
        loss: BatchLoss | None,
        *,
        train: bool,
    ) -> Run:
        """A run of a batch.

        Raises:
            ValueError: there is no input where one is needed, or something cannot be cut.
        """
        inputs: list[Value] = []
        with self._telling():
            if self._owns_first:
                if x is None:
                    raise ValueError(
                        f"rank {self._rank} owns the first stage, so it needs the batch's input x: got None"
                    )
                inputs = split(x, num_microbatches, "x")
            cut = split_keywords(keywords, num_microbatches, self._split_spec)
        return Run(step, inputs, cut, loss, train=train)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Let no rank wait for a batch that this one has refused."""
        try:
            yield
        except (ValueError, TypeError) as error:
            if self._transport.num_ranks * self._group.size > 1:
                reason = f"rank {self._rank} has refused its batch: {described(error)}"
                self._transport.abort(reason)
                self._group.abort(reason)
            raise
