"""Shared memory: frames between two ranks of one host, and what becomes of their slots."""

import gc
import os
import socket
from collections.abc import Iterator
from typing import Final

import pytest
import torch
from exchange import talk
from launching import launch_on

from stagewright.engine.errors import PeerError
from stagewright.engine.transport import neighbourhood
from stagewright.engine.transport.arena import FREE, NUM_SLOTS, SENT, TAKEN, make_file
from stagewright.engine.transport.frame import HEADER_SIZE
from stagewright.engine.transport.neighbour import _NEW_ARENA, _NUM_IDLE_RUNS, _SIGNAL, Neighbour, Outbox

LINE: Final = 0
Pair = tuple[Neighbour, Neighbour]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Ranks 0 and 1, each as the other sees it."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Neighbour(1, one), Neighbour(0, other)


def send(box: Outbox, text: bytes) -> None:
    """One frame, padded to the least size that one has."""
    frame = text.ljust(HEADER_SIZE, b".")
    arena, slot, space, _ = box.space(len(frame))
    space[:] = frame
    box.send(arena, slot, len(frame))


def flags(box: Outbox) -> list[int]:
    """Of all slots."""
    return [arena.flag(slot) for arena in box.arenas.values() for slot in range(len(arena))]


def test_a_slot_is_sent_then_taken_and_free_when_no_tensor_of_it_is_alive(pair: Pair) -> None:
    box = Outbox(pair[0], LINE)
    send(box, b"first")
    assert flags(box) == [SENT] + [FREE] * (NUM_SLOTS - 1)
    space = pair[1].take(LINE)
    assert bytes(space).rstrip(b".") == b"first"
    tensors = [torch.frombuffer(space, dtype=torch.uint8)[:3], torch.frombuffer(space, dtype=torch.uint8)]
    del space
    assert flags(box)[0] == TAKEN
    tensors.pop()
    assert flags(box)[0] == TAKEN
    assert tensors.pop().tolist() == list(b"fir")
    assert flags(box)[0] == FREE


def test_one_slot_serves_all_frames_that_are_released_in_time(pair: Pair) -> None:
    box = Outbox(pair[0], LINE)
    for index in range(3 * NUM_SLOTS):
        send(box, str(index).encode())
        assert bytes(pair[1].take(LINE)).rstrip(b".") == str(index).encode()
        assert flags(box) == [FREE] * NUM_SLOTS


def test_frames_that_are_held_keep_their_numbers_while_others_come_and_go(pair: Pair) -> None:
    box = Outbox(pair[0], LINE)
    held: dict[int, memoryview] = {}
    for index in range(2 * NUM_SLOTS):
        send(box, str(index).encode())
        held[index] = pair[1].take(LINE)
        if index % 3:
            del held[index]
    assert {index: int(bytes(space).rstrip(b".")) for index, space in held.items()} == {
        index: index for index in range(0, 2 * NUM_SLOTS, 3)
    }
    assert len(box.arenas) == 1
    more = []
    for _ in range(NUM_SLOTS):
        send(box, b"more")
        more.append(pair[1].take(LINE))
    assert len(box.arenas) == 2


def test_a_send_waits_only_while_its_limit_of_frames_was_not_taken(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is in use again is not the frame that lay there before: counted as one, both ends waited for ever."""
    box = Outbox(pair[0], LINE)
    pauses: list[None] = []
    monkeypatch.setattr(Neighbour, "pause", lambda neighbour: (pauses.append(None), neighbour_takes()))

    def neighbour_takes() -> None:
        pair[1].take(LINE)

    for _ in range(5):
        for _ in range(3):
            box.await_room(3)
            send(box, b"x")
        assert not pauses
        for _ in range(3):
            pair[1].take(LINE)
    for _ in range(5):
        box.await_room(3)
        send(box, b"x")
    assert len(pauses) == 2


def test_memory_that_no_run_uses_is_given_up_on_both_sides(pair: Pair) -> None:
    box = Outbox(pair[0], LINE)
    send(box, b"small")
    send(box, b"large" * 10_000)
    assert len(box.arenas) == 2
    for _ in range(2):
        pair[1].take(LINE)
    for _ in range(_NUM_IDLE_RUNS + 1):
        box.begin()
        send(box, b"small")
        pair[1].take(LINE)
    assert [arena.capacity for arena in box.arenas.values()] == [4096]
    assert [arena.capacity for arena in pair[1]._arenas.values()] == [4096]


def test_memory_in_use_is_never_given_up(pair: Pair) -> None:
    box = Outbox(pair[0], LINE)
    send(box, b"held")
    held = pair[1].take(LINE)
    for _ in range(2 * _NUM_IDLE_RUNS):
        box.begin()
    assert len(box.arenas) == 1
    assert bytes(held[:4]) == b"held"


@pytest.mark.parametrize(
    "signal",
    [
        b"",
        b"?",
        _SIGNAL.pack(LINE, 7, 0, HEADER_SIZE),
        _SIGNAL.pack(LINE, 0, NUM_SLOTS, HEADER_SIZE),
        _SIGNAL.pack(LINE, 0, 0, HEADER_SIZE - 1),
        _SIGNAL.pack(LINE, 0, 0, 4097),
        _SIGNAL.pack(LINE, 0, 0, 2**64 - 1),
        _SIGNAL.pack(_NEW_ARENA, 1, 0, 4096),
        _SIGNAL.pack(254, 9, 0, 0),
    ],
)
def test_a_signal_that_makes_no_sense_names_the_rank(pair: Pair, signal: bytes) -> None:
    send(Outbox(pair[0], LINE), b"makes an arena")
    pair[1].take(LINE)
    pair[0]._connection.send(signal)
    with pytest.raises((ValueError, PeerError), match="rank 0"):
        pair[1].take(LINE)


@pytest.mark.parametrize("fault", ["too small", "not sealed"])
def test_memory_that_could_shrink_under_a_reader_is_refused(pair: Pair, fault: str) -> None:
    """To read behind the end of a mapped file ends a process."""
    if fault == "too small":
        file, capacity = make_file(1)
        capacity *= 2
    else:
        file, capacity = os.memfd_create("not sealed"), 4096
        os.ftruncate(file, 2**20)
    socket.send_fds(pair[0]._connection, [_SIGNAL.pack(_NEW_ARENA, 0, 0, capacity)], [file])
    os.close(file)
    with pytest.raises(ValueError, match=r"what rank 0 sent makes no sense.*too small, or not sealed"):
        pair[1].take(LINE)


def test_the_last_words_of_a_rank_that_has_left_much_unread_are_heard() -> None:
    """A socket that is closed with something unread resets the connection, before what it said last."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    survivor, failing = Neighbour(1, one), Neighbour(0, other)
    send(Outbox(survivor, LINE), b"never read")
    failing.tell("rank 1 failed at 1F2 (step 3): ValueError: boom")
    del failing
    gc.collect()
    other.close()
    with pytest.raises(PeerError, match="rank 1 failed at 1F2"):
        survivor.take(LINE)


@pytest.mark.parametrize("pretended_hosts", [False, True])
def test_only_ranks_of_one_host_share_memory_and_all_hear_each_other(pretended_hosts: bool) -> None:
    (zero, _), (one, _), (two, received), (three, _) = launch_on("gloo", talk, 4, (pretended_hosts,))
    if pretended_hosts:
        assert (zero, one, two, three) == ([1], [0], [3], [2])
    else:
        assert (zero, one, two, three) == ([1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2])
    assert received is not None
    assert received.tolist() == [0, 1, 2]


def test_nobody_else_is_let_in() -> None:
    token = bytes(range(32))
    with neighbourhood._listen("a test of strangers", 2) as listener:
        for hello in (b"", b"x" * 36, neighbourhood._HELLO.pack(1, bytes(32))):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect("\0stagewright a test of strangers")
                stranger.send(hello)
                assert neighbourhood._answer(listener, token) == {}
        friend = neighbourhood._call(1, "a test of strangers", token.hex())
        found = neighbourhood._answer(listener, token)
        assert list(found) == [1]
        found[1].close()
        friend.close()
