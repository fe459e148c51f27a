"""Run: what one run of a program works on and brings forth."""

from collections.abc import Mapping, Sequence

from stagewright.engine.loss import BatchLoss
from stagewright.engine.timing.recorder import Moment
from stagewright.engine.value import Layout, Value


class Run:
    """One run of a program on one batch.

    Args:
        step: counts the batches, for the random numbers.
        inputs: one a microbatch, on ranks that own the first stage.
        keywords: further arguments of the stages, one dict a microbatch.
        loss: gathers the losses; None where only outputs are wanted.
        train: gradients are wanted.
        first: the number of the batch's first microbatch.
        shift: by how much the program's microbatches and versions are lower than the real ones.
    """

    def __init__(
        self,
        step: int,
        inputs: Sequence[Value],
        keywords: Sequence[Mapping[str, Value]],
        loss: BatchLoss | None,
        *,
        train: bool,
        first: int = 0,
        shift: tuple[int, int] = (0, 0),
    ) -> None:
        self.step = step
        self.inputs = inputs
        self.keywords = keywords
        self.loss = loss
        self.train = train
        self.first = first
        self.later_microbatches, self.later_versions = shift
        self.outputs: dict[int, Value] = {}
        self.times: list[tuple[Moment, Moment]] = []  # start and end of each instruction
        self.layouts: dict[tuple[bool, int], Layout] = {}  # (whether activation, stage that needs it) -> of a message
