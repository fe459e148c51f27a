"""Agreement: what an update depends on and no rank knows alone: the loss's count, the gradient norm, an overflow."""

import dataclasses
import math
from dataclasses import dataclass

import torch

from stagewright.engine.transport.contract import Channel, Receipt, Transport
from stagewright.engine.value import pack


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


class Agreement:
    """Takes every rank's scalars to all others; one is told, and later heard, at a time.

    Args:
        transport: connects the ranks.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport.host
        self._rank = transport.rank
        self._others = [rank for rank in range(transport.num_ranks) if rank != transport.rank]
        self._told: Scalars | None = None
        pairs = [(one, other) for one in range(transport.num_ranks) for other in range(transport.num_ranks)]
        self._transport.open([_channel(*pair) for pair in pairs if pair[0] != pair[1]])
        self._receipts: list[Receipt] = []

    def tell(self, own: Scalars) -> None:
        """Send this rank's part on its way."""
        self._told = own
        numbers = pack(torch.tensor(dataclasses.astuple(own), dtype=torch.float64), f"rank {self._rank}", "scalars")
        self._receipts = [self._transport.post(_channel(other, self._rank), 0, 0) for other in self._others]
        for other in self._others:
            self._transport.send(_channel(self._rank, other), numbers, 0, 0)

    def clear(self) -> None:
        """Forget what was told, after a failure."""
        self._told = None
        self._receipts = []

    def hear(self) -> Scalars | None:
        """Those of all ranks, added in the order of ranks and so the same everywhere; None if none were told."""
        if self._told is None:
            return None
        of_ranks = {self._rank: self._told}
        for other, receipt in zip(self._others, self._receipts):
            count, earlier, mixed, new, counts, overflow = receipt.wait().tensors[0].tolist()
            of_ranks[other] = Scalars(count, earlier, mixed, new, bool(counts), bool(overflow))
        self._told = None
        in_order = [of_ranks[rank] for rank in sorted(of_ranks)]
        return Scalars(
            sum(scalars.count for scalars in in_order),
            sum(scalars.earlier for scalars in in_order),
            sum(scalars.mixed for scalars in in_order),
            sum(scalars.new for scalars in in_order),
            any(scalars.counts for scalars in in_order),
            any(scalars.overflow for scalars in in_order),
        )


def _channel(source: int, destination: int) -> Channel:
    return Channel(source, destination, "scalars")


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

    @classmethod
    def of(cls, wanted: float | str | None) -> "LossScale | None":
        """The scale that a user asks for: a fixed one by its number, or "dynamic"; None for none.

        Raises:
            ValueError: it is neither.
        """
        if wanted is None:
            return None
        if wanted == "dynamic":
            return cls()
        if isinstance(wanted, int | float) and math.isfinite(wanted) and wanted > 0:
            return cls(float(wanted), dynamic=False)
        raise ValueError(f'loss_scale is a positive number or "dynamic": got {wanted!r}')

    def update(self, *, overflow: bool) -> None:
        """Note whether a step overflowed."""
        if not self.dynamic:
            return
        self.num_good_steps = 0 if overflow else self.num_good_steps + 1
        if overflow:
            self.value = max(self.value / 2, 1.0)
        elif self.num_good_steps == self.growth_interval:
            self.value, self.num_good_steps = self.value * 2, 0
