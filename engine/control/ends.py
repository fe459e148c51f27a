"""Ends: whether all ranks end their batches after the same one, where they go on from batch to batch without a flush.

A rank that drains its pipeline waits for gradients, and one that has begun a further batch for activations: each waits
for what the other will never send. Both are found out as soon as they know of each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Batches:
    """What one rank has done.

    Args:
        num_begun: batches that it has begun.
        ended: after how many of them it has drained, each time.
    """

    num_begun: int = 0
    ended: list[int] = field(default_factory=list)

    def reached(self, drain: int) -> int:
        """The batches that it has begun before a drain, or so far."""
        return self.ended[drain] if drain < len(self.ended) else self.num_begun


def find_conflict(of_ranks: Mapping[int, Batches], names: Mapping[int, str]) -> str | None:
    """Why the ranks cannot go on: one has begun a batch without which another has drained; None while none has."""
    for rank, batches in of_ranks.items():
        for drain, ended in enumerate(batches.ended):
            for other, of_other in of_ranks.items():
                if (begun := of_other.reached(drain)) > ended:
                    return (
                        f"data ended on {names[rank]} after batch {ended}, and {names[other]} has begun batch {begun}; "
                        "every rank makes the same number of steps"
                    )
    return None
