"""Capacities: both ends of a channel work out the same size for every receive, so that none is ever too small."""

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stagewright.engine.transport.capacity import Capacity
from stagewright.engine.transport.frame import FIRST_CAPACITY

sizes = st.integers(1, 60) | st.integers(FIRST_CAPACITY - 1, FIRST_CAPACITY + 1) | st.integers(10_000, 1_000_000)
# (depth of the channel in this run, sizes of its frames)
runs = st.lists(st.tuples(st.integers(1, 6), st.lists(sizes, max_size=25)), max_size=6)


def sent(capacity: Capacity, depth: int, frames: list[int]) -> list[int]:
    """The sender knows each frame as it sends it."""
    capacity.begin()
    capacities = []
    for index, num_bytes in enumerate(frames):
        capacities.append(capacity.of(index, depth))
        capacity.saw(index, num_bytes)
    return capacities


def received(capacity: Capacity, depth: int, frames: list[int], choices: random.Random) -> list[int]:
    """The receiver posts as far ahead as the depth allows and takes what it has posted in any order."""
    capacity.begin()
    capacities: list[int] = []
    posted: list[int] = []
    while len(capacities) < len(frames) or posted:
        oldest = min(posted, default=len(capacities))
        may_post = len(capacities) < len(frames) and len(capacities) - oldest < depth
        if may_post and (not posted or choices.random() < 0.5):
            posted.append(len(capacities))
            capacities.append(capacity.of(len(capacities), depth))
        else:
            index = posted.pop(choices.randrange(len(posted)))
            capacity.saw(index, frames[index])
    return capacities


@given(runs, st.randoms(use_true_random=False))
def test_both_ends_agree_whatever_is_sent_and_in_whatever_order_it_is_taken(
    runs: list[tuple[int, list[int]]], choices: random.Random
) -> None:
    sender, receiver = Capacity(), Capacity()
    for depth, frames in runs:
        capacities = sent(sender, depth, frames)
        assert received(receiver, depth, frames, choices) == capacities
        assert all(capacity >= FIRST_CAPACITY for capacity in capacities)
        assert all(one <= other for one, other in pairwise(capacities)), "within a run they only grow"


@given(st.integers(1, 6), sizes, st.integers(1, 30))
def test_frames_of_one_size_soon_arrive_whole(depth: int, num_bytes: int, count: int) -> None:
    capacity = Capacity()
    first = sent(capacity, depth, [num_bytes] * count)
    assert all(size >= num_bytes for size in first[depth:])
    assert all(size >= num_bytes for size in sent(capacity, depth, [num_bytes] * count))


def test_receives_shrink_again_after_a_large_batch() -> None:
    capacity = Capacity()
    large = sent(capacity, 1, [2**20] * 3)[-1]
    following = [sent(capacity, 1, [100] * 3)[0] for _ in range(12)]
    assert following == [max(FIRST_CAPACITY, large // 2**run) for run in range(12)]


def test_a_run_that_leaves_a_channel_out_changes_nothing() -> None:
    capacity = Capacity()
    sent(capacity, 1, [2**20] * 3)
    for _ in range(5):
        sent(capacity, 1, [])
    assert sent(capacity, 1, [100]) == [2**20]
