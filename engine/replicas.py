"""Replicas: the copies of a stage's weights that a bidirectional schedule holds, and the sum of their gradients."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch import Tensor, nn

from stagewright.engine.batchnorm import DeferredBatchNorms, Part
from stagewright.engine.ties import add_up
from stagewright.engine.transport.contract import Channel, Receipt, Transport
from stagewright.engine.value import Packed, check_crossing, pack, unpack
from stagewright.schedules import Placement

# What the copies of a stage have to add up: gradients, and what their batch norms have seen.
Sums: TypeAlias = tuple[Sequence[Tensor | None], Sequence[Part]]


class Replicas:
    """The gradients of this rank's stages, summed with those of the same stages on other ranks.

    Each copy sends its gradient to every other one, and all add them up in the order of ranks: so the sums, and
    with them the weights, stay equal to the last bit.

    Args:
        placement: says which ranks hold a copy of which stage.
        weights: the trained parameters of this rank's stages.
        norms: batch norms whose statistics are to be those of all copies together.
        transport: connects the ranks.
    """

    def __init__(
        self,
        placement: Placement,
        weights: Mapping[int, Mapping[str, nn.Parameter]],
        norms: DeferredBatchNorms,
        transport: Transport,
    ) -> None:
        self._norms = norms
        self._transport = transport
        self._parameters = {stage: list(parameters.values()) for stage, parameters in weights.items()}
        self._holders = {stage: placement.replicas_of(stage) for stage in weights}
        shared = max(sum(rank in holders for holders in self._holders.values()) for rank in range(placement.num_ranks))
        # A stage's sum is under way from its REDUCE_GRAD to its STEP, so two ranks have at most one a shared stage.
        self._depth = max(1, shared)
        transport.open([self._channel(*pair) for pair in _pairs(placement)])
        self._under_way: dict[int, dict[int, Receipt]] = {}

    def start(self, stage: int) -> None:
        """Send this copy's gradient to all others, and post the receives of theirs; a single copy is its own sum."""
        rank = self._transport.rank
        others = [holder for holder in self._holders[stage] if holder != rank]
        if not others:
            return
        own = pack([*self._own(stage)], f"stage {stage}", "gradient")
        check_crossing(own, f"stage {stage}", "gradient")
        receipts = {}
        for other in others:
            receipts[other] = self._transport.post(self._channel(other, rank), stage, 0)
        for other in others:
            self._transport.send(self._channel(rank, other), own, stage, 0)
        self._under_way[stage] = receipts

    def finish(self, stage: int) -> None:
        """Wait for the other copies' gradients and add them up."""
        receipts = self._under_way.pop(stage, None)
        if receipts is None:
            return
        of_ranks = {self._transport.rank: self._own(stage)}
        of_ranks |= {other: _sums(receipt.wait()) for other, receipt in receipts.items()}
        in_order = [of_ranks[rank] for rank in sorted(of_ranks)]
        for index, parameter in enumerate(self._parameters[stage]):
            parameter.grad = add_up([gradients[index] for gradients, _ in in_order])
        self._norms.join(stage, [parts for _, parts in in_order])

    def finish_all(self) -> None:
        """Finish whatever no STEP has waited for."""
        for stage in list(self._under_way):
            self.finish(stage)

    def clear(self) -> None:
        """Forget the sums of a batch that has failed."""
        self._under_way.clear()

    def _own(self, stage: int) -> Sums:
        return [parameter.grad for parameter in self._parameters[stage]], self._norms.parts(stage)

    def _channel(self, source: int, destination: int) -> Channel:
        return Channel(source, destination, "replica", self._depth)


def _pairs(placement: Placement) -> list[tuple[int, int]]:
    """The ranks that exchange gradients, as (source, destination)."""
    holders = [placement.replicas_of(stage) for stage in range(placement.num_stages)]
    return sorted({(one, other) for ranks in holders for one in ranks for other in ranks if one != other})


def _sums(packed: Packed) -> Sums:
    gradients, parts = unpack(packed.layout.skeleton, packed.tensors)
    return gradients, parts
