"""Ties: one weight that several stages use, each with a copy of its own; the gradients are summed over all."""

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from stagewright.engine.locals import local_gradient, local_of, spread_like
from stagewright.engine.transport.contract import Channel, Receipt, Session, Transport
from stagewright.engine.updates.sharing import Group, all_names, kind_of, members
from stagewright.engine.value import Packed, check_crossing, pack, unpack
from stagewright.schedules import Placement

# The name of a tied weight on each stage that has a copy.
Tie: TypeAlias = Mapping[int, str]
# One copy: which tie, which stage.
Copy: TypeAlias = tuple[int, int]


class Ties:
    """The tied weights of a rank.

    Every copy gets the sum of the gradients of all stages, added in the order of stages, and the same optimizer makes
    the same of it: so the copies stay equal to the last bit. At the start all copies take the first stage's value.

    Args:
        groups: names of parameters; those of one group are one weight.
        modules: this rank's, by stage; within each, a weight is one parameter.
        trained: what the optimizer trains of them, by stage and name.
        placement: says which ranks own which stage.
        transport: connects the ranks.

    Raises:
        ValueError: no stage has a parameter of that name, or tied ones do not match.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        modules: Mapping[int, nn.Module],
        trained: Mapping[int, Mapping[str, nn.Parameter]],
        placement: Placement,
        transport: Transport,
    ) -> None:
        self._parameters = {
            stage: {**dict(module.named_parameters()), **trained[stage]} for stage, module in modules.items()
        }
        self._transport = transport
        self._ties = self._find(groups, modules) if groups else []
        ranks = range(transport.num_ranks)
        lines = [(source, rank) for source in ranks for rank in ranks if self._sent(placement, source, rank)]
        self._outgoing = {rank: self._sent(placement, transport.rank, rank) for rank in ranks}
        self._incoming = {rank: self._sent(placement, rank, transport.rank) for rank in ranks}
        self._waiting = self._own_stages()
        self._receipts: dict[int, Receipt] = {}
        transport.open([_channel(*line) for line in lines])
        if self._ties:
            self._share_values()

    @property
    def stages(self) -> frozenset[int]:
        """The stages, of any rank, that have a tied weight."""
        return frozenset(stage for tie in self._ties for stage in tie)

    def repeated(self) -> set[nn.Parameter]:
        """The parameters of this rank that are a further copy of what an earlier stage has."""
        return {
            self._parameters[stage][tie[stage]]
            for tie in self._ties
            for stage in tie
            if stage != min(tie) and stage in self._parameters
        }

    def start(self, stage: int) -> None:
        """This stage's gradient is complete; once those of all tied stages here are, send them to where they count."""
        self._waiting.discard(stage)
        if not self._waiting:
            self._exchange(
                {other: [self._gradient(copy) for copy in copies] for other, copies in self._outgoing.items()}
            )

    def finish(self, *, counted: bool = False) -> None:
        """Give every copy on this rank the sum over all stages.

        Args:
            counted: only if this rank holds a first copy, whose gradient it counts in a norm; for the others it would
                wait here for no need.
        """
        if self._waiting or not self._ties or (counted and not any(min(tie) in self._parameters for tie in self._ties)):
            return
        self._waiting = self._own_stages()
        gradients = {copy: self._gradient(copy) for copy in self._own_copies()}
        gradients |= self._arrived()
        for index, tie in enumerate(self._ties):
            total = add_up([gradients[index, stage] for stage in sorted(tie) if (index, stage) in gradients])
            for stage in tie:
                if stage in self._parameters:
                    parameter = self._parameter((index, stage))
                    parameter.grad = None if total is None else spread_like(parameter, total.clone())

    def _find(self, groups: Sequence[Group], modules: Mapping[int, nn.Module]) -> list[Tie]:
        """Learn from all ranks which stages have the named parameters; a weight of one stage alone needs nothing."""
        own = []
        for stage, module in modules.items():
            names = all_names(module)
            for index, group in enumerate(groups):
                for name in members(group, stage, names):
                    parameter = self._parameters[stage][names[name]]
                    own.append((index, stage, name, names[name], kind_of(parameter)))
        found: list[dict[int, tuple[str, str]]] = [{} for _ in groups]
        named = set()
        for data in self._transport.gather(json.dumps(own).encode()):
            for index, stage, name, first_name, kind in json.loads(data):
                named |= {name, f"stage{stage}.{name}"}
                found[index][stage] = first_name, kind
        for group, tie in zip(groups, found):
            for name in group:
                if name not in named:
                    raise ValueError(f"a tied weight goes by its name in its stage: no stage has a parameter {name!r}")
            if len({kind for _, kind in tie.values()}) > 1:
                kinds = ", ".join(f"{name} of stage {stage}: {kind}" for stage, (name, kind) in sorted(tie.items()))
                raise ValueError(f"tied weights have one shape and type, and all are trained or none: got {kinds}")
        ties = [{stage: name for stage, (name, _) in sorted(tie.items())} for tie in found]
        return [tie for tie in ties if len(tie) > 1]

    def _share_values(self) -> None:
        """Let all copies start from the value of the first stage's."""
        self._transport.begin(Session(fixed_shapes=False))
        with torch.no_grad():
            self._exchange({other: [self._value(copy) for copy in copies] for other, copies in self._outgoing.items()})
            arrived: dict[Copy, Tensor | None] = {copy: self._value(copy) for copy in self._own_copies()}
            arrived |= self._arrived()
            for index, tie in enumerate(self._ties):
                for stage in tie:
                    value = arrived.get((index, min(tie)))
                    if stage in self._parameters and value is not None:
                        self._value((index, stage)).copy_(value)
        self._transport.end()

    def clear(self) -> None:
        """Forget the sums of a batch that has failed."""
        self._waiting = self._own_stages()
        self._receipts.clear()

    def _exchange(self, outgoing: Mapping[int, Sequence[Tensor | None]]) -> None:
        rank = self._transport.rank
        for other, copies in self._incoming.items():
            if copies:
                self._receipts[other] = self._transport.post(_channel(other, rank), 0, 0)
        for other, tensors in outgoing.items():
            if tensors:
                values = [None if tensor is None else tensor.detach() for tensor in tensors]
                packed = pack(values, "a tied weight", "gradient")
                check_crossing(packed, "a tied weight", "gradient")
                self._transport.send(_channel(rank, other), packed, 0, 0)

    def _arrived(self) -> dict[Copy, Tensor | None]:
        """What the other ranks have sent."""
        arrived: dict[Copy, Tensor | None] = {}
        for other, receipt in self._receipts.items():
            arrived |= zip(self._incoming[other], _tensors(receipt.wait()))
        self._receipts.clear()
        return arrived

    def _sent(self, placement: Placement, source: int, rank: int) -> list[Copy]:
        """What a rank sends to another: the copies that the first owner of their stage has and the other lacks."""
        return [
            (index, stage)
            for index, tie in enumerate(self._ties)
            for stage in sorted(tie)
            if placement.replicas_of(stage)[0] == source
            and rank not in placement.replicas_of(stage)
            and any(rank in placement.replicas_of(other) for other in tie)
        ]

    def _own_copies(self) -> list[Copy]:
        return [(index, stage) for index, tie in enumerate(self._ties) for stage in tie if stage in self._parameters]

    def _own_stages(self) -> set[int]:
        return {stage for _, stage in self._own_copies()}

    def _parameter(self, copy: Copy) -> nn.Parameter:
        index, stage = copy
        return self._parameters[stage][self._ties[index][stage]]

    def _value(self, copy: Copy) -> Tensor:
        return local_of(self._parameter(copy))

    def _gradient(self, copy: Copy) -> Tensor | None:
        return local_gradient(self._parameter(copy))


def add_up(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum in the given order, in new memory; None where nobody has any."""
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient.clone() if total is None else total.add_(gradient)
    return total


def _channel(source: int, destination: int) -> Channel:
    return Channel(source, destination, "tied")


def _tensors(packed: Packed) -> Sequence[Tensor | None]:
    tensors: Sequence[Tensor | None] = unpack(packed.layout.skeleton, packed.tensors)
    return tensors
