"""Costs: how long each kind of instruction takes, stage by stage."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

from stagewright.schedules.errors import ScheduleError

PerStage: TypeAlias = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Durations in any one unit; each a number for all stages or a sequence with one number a stage.

    Args:
        forward: of F.
        backward: of B; the sum of both gradients where left out.
        input_gradient: of I; half of ``backward`` where left out.
        weight_gradient: of W; what of ``backward`` the input gradient leaves where left out.
        overlapped: of a fused pair; the sum of its F and B where left out.
        send: from the end of the producer to the arrival at the next rank, for every hop.
        step: of an optimizer step.
    """

    forward: PerStage = 1.0
    backward: PerStage | None = None
    input_gradient: PerStage | None = None
    weight_gradient: PerStage | None = None
    overlapped: PerStage | None = None
    send: float = 0.0
    step: PerStage = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Sequence):
                object.__setattr__(self, field.name, tuple(value))  # so that costs are hashable and frozen
            if value is not None and any(number < 0 for number in (value if isinstance(value, Sequence) else [value])):
                raise ScheduleError(f"costs are durations, zero or more: got {field.name}={value}")

    def of_stages(self, num_stages: int) -> "StageCosts":
        """Resolve to one number a stage for every kind."""
        forward = _spread("forward", self.forward, num_stages)
        given_input, given_weight = self.input_gradient, self.weight_gradient
        backward = None if self.backward is None else _spread("backward", self.backward, num_stages)
        if given_input is not None:
            input_gradient = _spread("input_gradient", given_input, num_stages)
        elif backward is not None and given_weight is not None:
            weights = _spread("weight_gradient", given_weight, num_stages)
            input_gradient = tuple(max(whole - part, 0.0) for whole, part in zip(backward, weights))
        else:
            input_gradient = forward if backward is None else tuple(whole / 2 for whole in backward)
        if given_weight is not None:
            weight_gradient = _spread("weight_gradient", given_weight, num_stages)
        elif backward is not None:
            weight_gradient = tuple(max(whole - part, 0.0) for whole, part in zip(backward, input_gradient))
        else:
            weight_gradient = forward
        if backward is None:
            backward = tuple(map(sum, zip(input_gradient, weight_gradient)))
        if self.overlapped is None:
            overlapped: tuple[float, ...] | None = None
        else:
            overlapped = _spread("overlapped", self.overlapped, num_stages)
        step = _spread("step", self.step, num_stages)
        return StageCosts(forward, input_gradient, weight_gradient, backward, overlapped, step)


@dataclass(frozen=True)
class StageCosts:
    """Costs with one number a stage for every kind."""

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    backward: tuple[float, ...]
    overlapped: tuple[float, ...] | None
    step: tuple[float, ...]


def _spread(name: str, value: PerStage, num_stages: int) -> tuple[float, ...]:
    if not isinstance(value, Sequence):
        return (float(value),) * num_stages
    if len(value) != num_stages:
        raise ScheduleError(
            f"a sequence of costs has one number a stage: got {len(value)} {name} costs for {num_stages} stages"
        )
    return tuple(map(float, value))
