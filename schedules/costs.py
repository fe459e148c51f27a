"""Costs: how long each kind of instruction takes, and how much memory it holds, stage by stage."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from numbers import Real
from typing import Any, Final, TypeAlias

from stagewright.schedules.errors import ScheduleError

PerStage: TypeAlias = float | Sequence[float]

# Beyond this, sums of costs would no longer tell one instruction from another.
_MOST: Final = 1e30


@dataclass(frozen=True)
class Costs:
    """What a stage costs; each a number for all stages or a sequence with one number a stage.

    Durations are in any one unit, bytes in any other (the default stash of one counts stashes).

    Args:
        forward: duration of F.
        backward: duration of B; the sum of both gradients where left out.
        input_gradient: duration of I; half of ``backward`` where left out.
        weight_gradient: duration of W; what of ``backward`` the input gradient leaves where left out.
        overlapped: duration of a fused pair, by the stage of its forward; the sum of its F and B where left out.
        recompute: of a forward that is repeated when its gradient is due; it adds to every B and I.
        send: latency of the hop from a stage to the next, and of the gradient on its way back; messages pipeline.
        message_bytes: what a stage sends to the next one, and what comes back as its gradient.
        bandwidth: bytes per unit of time of each channel (source, destination, direction), which serves in order.
        step: duration of a stage's optimizer step.
        reduce: duration of a stage's gradient reduction, once all replicas have begun it.
        activation_bytes: what F makes and I frees (B too).
        weight_bytes: what F makes and W frees (B too).
    """

    forward: PerStage = 1.0
    backward: PerStage | None = None
    input_gradient: PerStage | None = None
    weight_gradient: PerStage | None = None
    overlapped: PerStage | None = None
    recompute: PerStage = 0.0
    send: PerStage = 0.0
    message_bytes: PerStage = 0.0
    bandwidth: float = inf
    step: PerStage = 0.0
    reduce: PerStage = 0.0
    activation_bytes: PerStage = 0.0
    weight_bytes: PerStage = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            value = _plain(field.name, value)
            object.__setattr__(self, field.name, value)  # numbers or tuples, so that costs are hashable and frozen
            numbers = value if isinstance(value, tuple) else [value]
            if field.name == "bandwidth":
                if isinstance(value, tuple) or not value > 0:
                    raise ScheduleError(f"a bandwidth is one number above zero, infinite by default: got {value}")
            elif not all(0 <= number <= _MOST for number in numbers):
                raise ScheduleError(f"costs are finite, at most {_MOST:g}, and zero or more: got {field.name}={value}")

    def scaled(self, share: float) -> "Costs":
        """The costs of a stage that is so large a share of this one: it computes, updates and stashes that share.

        What is sent stays as it is: a boundary is as wide wherever a model is cut.
        """
        scaled: dict[str, PerStage] = {}
        for name in _SCALED:
            value: PerStage | None = getattr(self, name)
            if isinstance(value, Sequence):
                scaled[name] = tuple(number * share for number in value)
            elif value is not None:
                scaled[name] = value * share
        return replace(self, **scaled)  # type: ignore[arg-type]  # the names are those of PerStage fields

    def of_stages(self, num_stages: int) -> "StageCosts":
        """Resolve to one number a stage for every kind.

        Raises:
            ScheduleError: a sequence has not one number a stage.
        """
        spread = {
            field.name: _spread(field.name, getattr(self, field.name), num_stages)
            for field in fields(self)
            if field.name != "bandwidth" and getattr(self, field.name) is not None
        }
        forward, recompute = spread["forward"], spread["recompute"]
        backward, weight_gradient = spread.get("backward"), spread.get("weight_gradient")
        if "input_gradient" in spread:
            input_gradient = spread["input_gradient"]
        elif backward is not None and weight_gradient is not None:
            input_gradient = _rest(backward, weight_gradient)
        else:
            input_gradient = forward if backward is None else tuple(whole / 2 for whole in backward)
        if weight_gradient is None:
            weight_gradient = forward if backward is None else _rest(backward, input_gradient)
        if backward is None:
            backward = _sum(input_gradient, weight_gradient)
        return StageCosts(
            forward=forward,
            input_gradient=_sum(input_gradient, recompute),
            weight_gradient=weight_gradient,
            backward=_sum(backward, recompute),
            overlapped=spread.get("overlapped"),
            send=spread["send"],
            transfer=tuple(size / self.bandwidth for size in spread["message_bytes"]),
            step=spread["step"],
            reduce=spread["reduce"],
            activation_bytes=spread["activation_bytes"],
            weight_bytes=spread["weight_bytes"],
        )


@dataclass(frozen=True)
class StageCosts:
    """Costs with one number a stage for every kind; B and I include what is recomputed.

    ``transfer`` is how long a message keeps its channel; ``send`` and ``transfer`` of a stage are those of the boundary
    to the next stage, in either direction.
    """

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    backward: tuple[float, ...]
    overlapped: tuple[float, ...] | None
    send: tuple[float, ...]
    transfer: tuple[float, ...]
    step: tuple[float, ...]
    reduce: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    weight_bytes: tuple[float, ...]


_SCALED: Final = tuple(
    field.name for field in fields(Costs) if field.name not in ("send", "message_bytes", "bandwidth")
)


def _spread(name: str, value: PerStage, num_stages: int) -> tuple[float, ...]:
    if not isinstance(value, Sequence):
        return (float(value),) * num_stages
    if len(value) != num_stages:
        raise ScheduleError(
            f"a sequence of costs has one number a stage: got {len(value)} {name} costs for {num_stages} stages"
        )
    return tuple(map(float, value))


def _sum(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
    return tuple(one + other for one, other in zip(first, second))


def _rest(whole: Sequence[float], part: Sequence[float]) -> tuple[float, ...]:
    if any(other > one for one, other in zip(whole, part)):
        raise ScheduleError(
            f"one half of a backward takes at most the whole: got {_least(part)} of backward={_least(whole)}; give "
            "input_gradient and weight_gradient both where measured costs do not add up"
        )
    return tuple(one - other for one, other in zip(whole, part))


def _least(numbers: Sequence[float]) -> float | tuple[float, ...]:
    """One number where all are the same."""
    return numbers[0] if len(set(numbers)) == 1 else tuple(numbers)


def _plain(name: str, value: object) -> float | tuple[float, ...]:
    """A number, or one a stage, as Python's own; those of arrays and tensors are taken too."""
    numbers = _unpacked(value)
    if isinstance(numbers, Sequence) and not isinstance(numbers, str | bytes):
        numbers = tuple(map(_unpacked, numbers))
        if all(isinstance(number, Real) for number in numbers):
            return numbers
    elif isinstance(numbers, Real):
        return numbers  # type: ignore[return-value]  # a whole number stays one
    raise TypeError(f"a cost is a number, or one a stage: got {name}={value!r}")


def _unpacked(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
