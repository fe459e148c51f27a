"""Ranks that end their batches after different ones are told from ranks that are only ahead of others."""

import pytest

from stagewright.engine.control.ends import Batches, find_conflict

NAMES = {rank: f"rank {rank}" for rank in range(3)}


@pytest.mark.parametrize(
    "of_ranks",
    [
        {0: Batches(3, [3]), 1: Batches(2), 2: Batches(3, [3])},
        {0: Batches(5, [3]), 1: Batches(3, [3]), 2: Batches(3)},
        {0: Batches(5, [3, 5]), 1: Batches(4, [3])},
        {0: Batches(), 1: Batches()},
        {0: Batches(0, [0]), 1: Batches()},
    ],
    ids=["behind", "ahead", "behind in the second part", "nothing yet", "nothing at all"],
)
def test_ranks_of_different_speed_agree(of_ranks: dict[int, Batches]) -> None:
    assert find_conflict(of_ranks, NAMES) is None


@pytest.mark.parametrize(
    ("of_ranks", "message"),
    [
        ({0: Batches(3, [3]), 1: Batches(4)}, "data ended on rank 0 after batch 3, and rank 1 has begun batch 4"),
        ({0: Batches(4, [4]), 2: Batches(3, [3])}, "data ended on rank 2 after batch 3, and rank 0 has begun batch 4"),
        ({0: Batches(6), 1: Batches(5, [5])}, "data ended on rank 1 after batch 5, and rank 0 has begun batch 6"),
        (
            {0: Batches(5, [3, 5]), 1: Batches(9, [3])},
            "data ended on rank 0 after batch 5, and rank 1 has begun batch 9",
        ),
    ],
)
def test_a_batch_that_another_rank_will_never_have_is_found(of_ranks: dict[int, Batches], message: str) -> None:
    assert str(find_conflict(of_ranks, NAMES)).startswith(message)
