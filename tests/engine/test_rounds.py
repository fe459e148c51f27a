"""Ranks of one start find each other, whatever ranks of earlier starts have left behind in the store."""

import time
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import HashStore

from stagewright.engine.launch.rounds import enter_round


def enter(store: HashStore, rank: int, num_ranks: int) -> tuple[str, bool]:
    """What rank 0 says in the round, and whether it had been said before that."""
    own = enter_round(store, rank, num_ranks)
    was_there = own.check(["word"]) if rank == 0 else False
    if rank == 0:
        own.set("word", str(id(own)))
    return own.get("word").decode(), was_there


def test_every_start_has_a_round_of_its_own() -> None:
    store = HashStore()
    with ThreadPoolExecutor(4) as pool:
        for num_ranks in (1, 4, 4, 2, 4):
            words = list(pool.map(enter, [store] * num_ranks, range(num_ranks), [num_ranks] * num_ranks))
            assert words == [(words[0][0], False)] * num_ranks


def test_ranks_that_have_died_are_not_waited_for() -> None:
    """They had asked, and were answered by nobody, or by a rank 0 that is no more; those after them ask again."""
    store = HashStore()
    store.set("rank 1 asks", "of one that has died")
    store.set("rank 2 asks", "of another")
    store.set("answer to of another", "an old round")
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(enter, store, 0, 3)
        while store.get("answer to of another") == b"an old round":  # rank 0 has begun with the dead
            time.sleep(0.001)
        others = [pool.submit(enter, store, rank, 3) for rank in (1, 2)]
        assert [other.result() for other in others] == [first.result()] * 2


def test_what_was_said_is_forgotten() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            list(pool.map(enter, [store] * 3, range(3), [3] * 3))
    assert store.num_keys() == 5, "the word of each round"
