"""Agreement: what an update depends on and no rank knows alone: the loss's count, the gradient norm, an overflow."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stagewright.engine.transport.contract import Transport

_SCALARS: Final = struct.Struct("<4d??")


@dataclass(frozen=True)
class Scalars:
    """What a rank knows, or all ranks together.

    Args:
        count: what the loss averages over, where it comes as (sum, count); 0 elsewhere.
        earlier, mixed, new: the sums of e*e, e*n and n*n over the gradients e of earlier, accumulated batches and n
            of this one, each weight counted once.
        counts: whether the loss comes as (sum, count).
        overflow: whether a gradient is infinite or no number.
    """

    count: float = 0.0
    earlier: float = 0.0
    mixed: float = 0.0
    new: float = 0.0
    counts: bool = False
    overflow: bool = False

    def norm(self, factor: float) -> float:
        """The norm of e + factor * n."""
        return math.sqrt(max(self.earlier + 2 * factor * self.mixed + factor * factor * self.new, 0.0))


def agree(own: Scalars, transport: Transport) -> Scalars:
    """The scalars of all ranks together, added in the order of ranks: the same number everywhere."""
    data = _SCALARS.pack(own.count, own.earlier, own.mixed, own.new, own.counts, own.overflow)
    of_ranks = [Scalars(*_SCALARS.unpack(other)) for other in transport.gather(data)]
    return Scalars(
        sum(scalars.count for scalars in of_ranks),
        sum(scalars.earlier for scalars in of_ranks),
        sum(scalars.mixed for scalars in of_ranks),
        sum(scalars.new for scalars in of_ranks),
        any(scalars.counts for scalars in of_ranks),
        any(scalars.overflow for scalars in of_ranks),
    )


class LossScale:
    """The factor that keeps small fp16 gradients from vanishing (Micikevicius et al. 2018, section 3.2).

    It halves when a gradient overflows, and doubles after some steps without.

    Args:
        value: the factor to start with.
        dynamic: whether it changes at all.
        growth_interval: steps without overflow after which it doubles.
    """

    def __init__(self, value: float = 65536.0, *, dynamic: bool = True, growth_interval: int = 2000) -> None:
        self.value = value
        self.dynamic = dynamic
        self.growth_interval = growth_interval
        self.num_good_steps = 0

    def update(self, *, overflow: bool) -> None:
        """Note whether a step overflowed."""
        if not self.dynamic:
            return
        self.num_good_steps = 0 if overflow else self.num_good_steps + 1
        if overflow:
            self.value = max(self.value / 2, 1.0)
        elif self.num_good_steps == self.growth_interval:
            self.value, self.num_good_steps = self.value * 2, 0

