"""Agreement: what an update depends on and no rank knows alone: the loss's count, the gradient norm, an overflow."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from stagewright.engine.transport.contract import Channel, Kind, Receipt, Transport
from stagewright.engine.transport.group import Group, start_numbers
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
        loss_scale: by what the losses were multiplied; 0 where no loss was computed.
        faulty: the first microbatch whose loss is NaN or infinite, counted from 1; 0 where all are finite, or nobody
            has looked.
        replica, step: where and when it was.
    """

    count: float = 0.0
    earlier: float = 0.0
    mixed: float = 0.0
    new: float = 0.0
    counts: bool = False
    overflow: bool = False
    loss_scale: float = 0.0
    faulty: int = 0
    replica: int = 0
    step: int = 0

    def norm(self, factor: float) -> float:
        """The norm of e + factor * n."""
        return math.sqrt(max(self.earlier + 2 * factor * self.mixed + factor * factor * self.new, 0.0))


class Agreement:
    """Takes every rank's scalars to all others; one is told, and later heard, at a time.

    Args:
        transport: connects the ranks.
        group: the same rank of all replicas. They differ in their counts alone: gradients are the same on all of them,
            and with those norms and overflows.
    """

    def __init__(self, transport: Transport, group: Group) -> None:
        self.rank = transport.rank
        self.replica, self.num_replicas = group.rank, group.size
        self._group = group
        self._transport = transport.host
        ranks = range(transport.num_ranks)
        self._others = [rank for rank in ranks if rank != transport.rank]
        self._told: Scalars | None = None
        pairs = [(one, other) for one in ranks for other in ranks if one != other]
        self._transport.open([Channel(*pair, kind) for kind in _KINDS for pair in pairs])
        self._receipts: list[Receipt] = []

    def tell(self, own: Scalars, *, watched: bool = False) -> None:
        """Send this rank's part on its way; a count, or a loss that is watched, first becomes that of all replicas."""
        if self._group.size > 1 and (own.counts or watched):
            own = self._of_replicas(own)
        self._told = own
        numbers = pack(torch.tensor(dataclasses.astuple(own), dtype=torch.float64), f"rank {self.rank}", "scalars")
        self._receipts = [self._transport.post(Channel(other, self.rank, "scalars"), 0, 0) for other in self._others]
        for other in self._others:
            self._transport.send(Channel(self.rank, other, "scalars"), numbers, 0, 0)

    def clear(self) -> None:
        """Forget what was told, after a failure."""
        self._told = None
        self._receipts = []

    def hear(self) -> Scalars | None:
        """Those of all ranks, added in the order of ranks and so the same everywhere; None if none were told."""
        if self._told is None:
            return None
        of_ranks = {self.rank: self._told}
        for other, receipt in zip(self._others, self._receipts):
            count, earlier, mixed, new, counts, overflow, scale, *where = receipt.wait().tensors[0].tolist()
            faulty, replica, step = map(int, where)
            of_ranks[other] = Scalars(
                count, earlier, mixed, new, bool(counts), bool(overflow), scale, faulty, replica, step
            )
        self._told = None
        in_order = [of_ranks[rank] for rank in sorted(of_ranks)]
        faults = [(scalars.replica, scalars.faulty, scalars.step) for scalars in in_order if scalars.faulty]
        replica, faulty, step = min(faults, default=(0, 0, 0))
        return Scalars(
            sum(scalars.count for scalars in in_order),
            sum(scalars.earlier for scalars in in_order),
            sum(scalars.mixed for scalars in in_order),
            sum(scalars.new for scalars in in_order),
            any(scalars.counts for scalars in in_order),
            any(scalars.overflow for scalars in in_order),
            max(scalars.loss_scale for scalars in in_order),
            faulty,
            replica,
            step,
        )

    def _of_replicas(self, own: Scalars) -> Scalars:
        """With the count of all replicas, and the first of them that has a loss which is not finite."""
        faulty = [0] * self._group.size
        faulty[self._group.rank] = own.faulty
        count, *of_replicas = start_numbers(self._group, [own.count, *faulty]).wait().tolist()
        replica = next((index for index, microbatch in enumerate(of_replicas) if microbatch), 0)
        return dataclasses.replace(own, count=count, faulty=int(of_replicas[replica]), replica=replica)

    def spread(self, own: bytes, sources: Sequence[int], readers: Sequence[int]) -> list[bytes]:
        """Bring what some ranks know to others, in one message each; every rank calls this alike.

        Args:
            own: what this rank knows; is not looked at unless it is a source.
            sources, readers: the ranks that give, and those that get.

        Returns:
            What each source has given, in their order; nothing on a rank that is no reader.
        """
        others = [source for source in sources if source != self.rank] if self.rank in readers else []
        receipts = {other: self._transport.post(Channel(other, self.rank, "gather"), 0, 0) for other in others}
        if self.rank in sources:
            letter = pack(torch.frombuffer(bytearray(own), dtype=torch.uint8), f"rank {self.rank}", "data")
            for reader in readers:
                if reader != self.rank:
                    self._transport.send(Channel(self.rank, reader, "gather"), letter, 0, 0)
        given = {other: bytes(receipt.wait().tensors[0].numpy().data) for other, receipt in receipts.items()}
        return [given.get(source, own) for source in sources] if self.rank in readers else []


# What numbers travel as, and what ``spread`` does.
_KINDS: Final[tuple[Kind, ...]] = ("scalars", "gather")


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
