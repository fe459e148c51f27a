"""Replicas: copies of a stage's weights within a pipeline, and the sum of their gradients.

A bidirectional schedule holds each stage twice or more; other schedules do where one asks for replicas of a stage.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from stagewright.engine.locals import local_gradient, local_of, spread_like
from stagewright.engine.transport.contract import Channel, Receipt, Session, Transport
from stagewright.engine.updates.ties import add_up
from stagewright.engine.value import Packed, check_crossing, pack, unpack
from stagewright.schedules import Placement


class Replicas:
    """The gradients of this rank's stages, summed with those of the same stages on other ranks.

    Each copy sends its gradient to every other one, and all add them up in the order of ranks: so the sums, and
    with them the weights, stay equal to the last bit.

    Args:
        placement: says which ranks hold a copy of which stage.
        weights: the trained parameters of this rank's stages.
        transport: connects the ranks.
    """

    def __init__(
        self,
        placement: Placement,
        weights: Mapping[int, Mapping[str, nn.Parameter]],
        transport: Transport,
    ) -> None:
        self._transport = transport
        self._parameters = {stage: list(parameters.values()) for stage, parameters in weights.items()}
        self._holders = {stage: placement.replicas_of(stage) for stage in weights}
        self._placement = placement
        transport.open(_channels(placement))
        self._under_way: dict[int, dict[int, Receipt]] = {}

    def start(self, stage: int) -> None:
        """Send this copy's gradient to all others, and post the receives of theirs; a single copy is its own sum."""
        rank = self._transport.rank
        others = [holder for holder in self._holders[stage] if holder != rank]
        if not others:
            return
        own = pack(self._own(stage), f"stage {stage}", "gradient")
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
        of_ranks |= {other: _gradients(receipt.wait()) for other, receipt in receipts.items()}
        in_order = [of_ranks[rank] for rank in sorted(of_ranks)]
        for index, parameter in enumerate(self._parameters[stage]):
            total = add_up([gradients[index] for gradients in in_order])
            parameter.grad = None if total is None else spread_like(parameter, total)

    def finish_all(self) -> None:
        """Finish whatever no STEP has waited for."""
        for stage in list(self._under_way):
            self.finish(stage)

    def clear(self) -> None:
        """Forget the sums of a batch that has failed."""
        self._under_way.clear()

    def _own(self, stage: int) -> list[Tensor | None]:
        return [local_gradient(parameter) for parameter in self._parameters[stage]]

    def _channel(self, source: int, destination: int) -> Channel:
        return _channel(self._placement, source, destination)


def share_values(placement: Placement, modules: Mapping[int, nn.Module], transport: Transport) -> None:
    """Let all copies of a stage start from what the first of them holds, buffers too; every rank calls this alike.

    Args:
        placement: says which ranks hold a copy of which stage.
        modules: this rank's, by stage.
        transport: connects the ranks.
    """
    channels = _channels(placement)
    if not channels:
        return
    transport.open(channels)
    transport.begin(Session(fixed_shapes=False))
    for stage, module in modules.items():
        first, *others = placement.replicas_of(stage)
        tensors = [local_of(tensor.detach()) for tensor in (*module.parameters(), *module.buffers())]
        if transport.rank == first:
            packed = pack(tensors, f"stage {stage}", "weight")
            for other in others:
                transport.send(_channel(placement, first, other), packed, stage, 0)
            continue
        received = transport.post(_channel(placement, first, transport.rank), stage, 0).wait()
        for tensor, value in zip(tensors, received.tensors, strict=True):
            tensor.copy_(value)
    transport.end()


def _channels(placement: Placement) -> list[Channel]:
    """Between the ranks that hold copies of the same stage, both ways."""
    holders = [placement.replicas_of(stage) for stage in range(placement.num_stages)]
    pairs = {(one, other) for ranks in holders for one in ranks for other in ranks if one != other}
    return [_channel(placement, *pair) for pair in sorted(pairs)]


def _channel(placement: Placement, source: int, destination: int) -> Channel:
    """A stage's sum is under way from its REDUCE_GRAD to its STEP, so there is at most one a shared stage."""
    shared = set(placement.stages_of(source)) & set(placement.stages_of(destination))
    return Channel(source, destination, "replica", len(shared))


def _gradients(packed: Packed) -> list[Tensor | None]:
    gradients: list[Tensor | None] = unpack(packed.layout.skeleton, packed.tensors)
    return gradients
