"""Round: ranks that were started together find each other in a store that outlives them.

torchrun keeps one store for all its restarts, in which ranks that are no more have left their notes. So no rank takes
anything for true that a rank of its own start has not written: rank 0 names the round to whoever has asked for it, and
nobody reads an answer to somebody else's question.
"""

import secrets
import time
from typing import Final

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

_LOOK_SECONDS: Final = 0.01


def enter_round(store: Store, rank: int, num_ranks: int) -> Store:
    """A part of the store in which there is nothing yet, the same for all ranks that were started together.

    Args:
        store: of these and earlier ranks.
        rank, num_ranks: of the caller.

    Raises:
        RuntimeError: the store has gone, or others do not come for as long as it waits for anything.
    """
    return PrefixStore(_named(store, num_ranks) if rank == 0 else _asked(store, rank), store)


def _named(store: Store, num_ranks: int) -> str:
    """Name a round, and tell its name to everyone who asks, until all have it."""
    name = f"round {secrets.token_hex(8)}"
    absent = set(range(1, num_ranks))
    answered: dict[int, str] = {}
    while absent:
        for rank in sorted(absent):
            if store.check([f"rank {rank} is in {name}"]):
                absent.remove(rank)
                for key in (f"rank {rank} is in {name}", f"rank {rank} asks"):
                    store.delete_key(key)
            elif store.check([f"rank {rank} asks"]):
                question = store.get(f"rank {rank} asks").decode()
                if answered.get(rank) != question:
                    store.set(f"answer to {question}", name)
                answered[rank] = question
        time.sleep(_LOOK_SECONDS if absent else 0.0)
    return name


def _asked(store: Store, rank: int) -> str:
    """Ask for the name of the round."""
    question = secrets.token_hex(8)
    store.set(f"rank {rank} asks", question)
    name = store.get(f"answer to {question}").decode()
    store.delete_key(f"answer to {question}")
    store.set(f"rank {rank} is in {name}", "")
    return name
