"""Gloo: what arrives is what was sent, whatever its size; no frame is alive for longer than it is needed."""

import random

import pytest
from exchange import begin_in_flight, count_frames, count_slots, exchange, gather_much, interleave
from launching import launch_on

# Elements of eight bytes; the first receive of a channel is of 4096 bytes.
GROWING = [2**power for power in range(20)]
RUNS = {
    "growing": [(1, GROWING), (3, GROWING)],
    "shrinking": [(1, GROWING[::-1]), (2, GROWING[::-1])],
    "alternating": [(2, [1, 100_000] * 10), (4, [100_000, 1] * 10)],
    "all larger than the first receive": [(4, [5000] * 12)],
    "around the first receive": [(2, list(range(490, 520)))],
    "empty": [(2, [0] * 5), (1, []), (3, [0, 1, 0])],
    "depth that changes from run to run": [(depth, [700 * depth] * 9) for depth in (1, 5, 2, 6, 1)],
    "many runs": [(2, [size, 10 * size]) for size in range(0, 3000, 100)],
}

KINDS = pytest.mark.parametrize("kind", ["gloo", "shared"])


@KINDS
@pytest.mark.parametrize("name", RUNS)
def test_messages_of_any_size_arrive(name: str, kind: str) -> None:
    assert launch_on("gloo", exchange, 2, (kind, RUNS[name], 0)) == [[], []]


@KINDS
@pytest.mark.parametrize("seed", range(8))
def test_messages_of_random_sizes_arrive_in_whatever_order_they_are_taken(seed: int, kind: str) -> None:
    choices = random.Random(seed)
    runs = [
        (choices.randint(1, 7), [choices.choice([0, 3, 500, 512, 4000, 60_000]) for _ in range(choices.randint(0, 30))])
        for _ in range(10)
    ]
    assert launch_on("gloo", exchange, 2, (kind, runs, seed)) == [[], []]


@KINDS
def test_gather_gives_every_rank_all_bytes_in_order(kind: str) -> None:
    sizes = [0, 1, 10, 5000, 200_000, 0, 3]
    expected = [[bytes([rank]) * (size if rank % 2 else 2 * size) for rank in range(4)] for size in sizes]
    assert launch_on("gloo", gather_much, 4, (kind, sizes)) == [expected] * 4


@KINDS
def test_two_transports_of_one_group_do_not_mix_their_messages(kind: str) -> None:
    """The larger message would abort the process if it met the other one's receive."""
    assert launch_on("gloo", interleave, 2, (kind,)) == [[], [list(range(10_000)), list(range(3))]]


@KINDS
def test_a_run_does_not_begin_while_another_is_in_flight(kind: str) -> None:
    _, told = launch_on("gloo", begin_in_flight, 2, (kind,))
    assert "another pipeline has microbatches in flight on this transport: call its flush() before" in told


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_receive_buffers_are_bounded_by_what_is_in_flight_and_not_by_m(num_ranks: int) -> None:
    few, many = (launch_on("gloo", count_frames, num_ranks, ("1f1b", count)) for count in (8, 64))
    for of_few, of_many in zip(few, many):
        assert of_many.most_received == of_few.most_received
        assert of_many.left_received == 0


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shared_memory_is_bounded_by_what_is_in_flight_and_not_by_m(num_ranks: int) -> None:
    """Eight may have been sent and not taken, and those taken are in flight."""
    for most, left in launch_on("gloo", count_slots, num_ranks, ("1f1b", 64)):
        assert 0 < most <= 8 + num_ranks
        assert left == 0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_frames_that_were_taken_are_released(schedule: str) -> None:
    """Eight may be under way on a channel, and one is being written."""
    for frames in launch_on("gloo", count_frames, 2, (schedule, 64)):
        assert 0 < frames.most_sent <= 9
        assert frames.left_sent == 0
