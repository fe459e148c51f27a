"""Channels: every line that a program uses, with the depth that its receives really reach."""

from itertools import product

import pytest
from shapes import label, schedules_of, synchronous_names

from stagewright.engine.channels import channels_of
from stagewright.schedules import Program, Schedule, create
from stagewright.schedules.instructions import SendActivation, SendGradient
from stagewright.schedules.placement import linear


def text_of(program: Program) -> list[list[str]]:
    """Every stream as single tokens, the halves of fused pairs apart."""
    pairs = [[str(instruction).strip("()").removesuffix(")OVERLAP_F_B") for instruction in s] for s in program.streams]
    return [[token for pair in stream for token in pair.split(";")] for stream in pairs]


def needed(token: str) -> str | None:
    """The receive whose message a computation needs: 2F5 that of 2RECV_F5, 2I5 and 2B5 that of 2RECV_B5."""
    token = token.partition("@")[0]
    for letter, kind in (("F", "F"), ("I", "B"), ("B", "B")):
        stage, found, microbatch = token.partition(letter)
        if found and stage.isdigit() and microbatch.isdigit():
            return f"{stage}RECV_{kind}{microbatch}"
    return None


def depth_of(posts: list[tuple[int, int]]) -> int:
    """From when each message of a line is posted and when it is needed: how many then lie between it and the oldest."""
    depth = 1
    for index, (posted, _) in enumerate(posts):
        waiting = [earlier for earlier in range(index) if posts[earlier][1] > posted]
        depth = max(depth, index - min(waiting, default=index) + 1)
    return depth


def expected(program: Program) -> dict[tuple[int, int, str], int]:
    """The depths, worked out from the text of the streams alone."""
    depths = {}
    for rank, tokens in enumerate(text_of(program)):
        when_needed = {needed(token): position for position, token in enumerate(tokens) if needed(token)}
        lines: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
        for position, token in enumerate(tokens):
            stage, found, rest = token.partition("RECV_")
            if found:
                neighbour = int(stage) - 1 if rest[0] == "F" else int(stage) + 1
                source = program.placement.rank_of(neighbour, int(rest[1:]))
                line = (source, rank, "activation" if rest[0] == "F" else "gradient")
                lines.setdefault(line, []).append((position, when_needed[token]))
        depths |= {line: depth_of(posts) for line, posts in lines.items()}
    return depths


@pytest.mark.parametrize(
    "schedule",
    [
        schedule
        for name in (*synchronous_names(), "2bw", "pipedream")
        for schedule in schedules_of(name, (1, 2, 4), (1, 8, 9))
    ],
    ids=label,
)
def test_depths_are_what_the_streams_reach(schedule: Schedule) -> None:
    program = schedule.program()
    channels = channels_of(program)
    assert {line: channel.depth for line, channel in channels.items()} == expected(program)
    assert all(channel.line == line for line, channel in channels.items())


@pytest.mark.parametrize(("name", "num_ranks"), list(product(synchronous_names(), (2, 4))))
def test_every_send_has_a_channel(name: str, num_ranks: int) -> None:
    for schedule in schedules_of(name, (num_ranks,), (8,)):
        program = schedule.program()
        sends = set()
        for rank, stream in enumerate(program.streams):
            for instruction in stream:
                match instruction:
                    case SendActivation(stage, microbatch):
                        sends.add((rank, program.placement.rank_of(stage + 1, microbatch), "activation"))
                    case SendGradient(stage, microbatch):
                        sends.add((rank, program.placement.rank_of(stage - 1, microbatch), "gradient"))
        assert sends == set(channels_of(program))


def test_a_program_within_one_rank_has_no_channels() -> None:
    assert channels_of(create("interleaved", num_ranks=1, num_microbatches=4, num_chunks=2).program()) == {}


@pytest.mark.parametrize(
    ("receiver", "depth"),
    [
        ("1RECV_F0,1F0,1RECV_F1,1F1,1RECV_F2,1F2", 1),
        ("1RECV_F0,1RECV_F1,1F0,1RECV_F2,1F1,1F2", 2),
        ("1RECV_F0,1RECV_F1,1RECV_F2,1F0,1F1,1F2", 3),
        ("1RECV_F0,1RECV_F1,1F1,1RECV_F2,1F2,1F0", 3),  # the oldest waits longest, though only two ever lie there
    ],
)
def test_depth_counts_from_the_oldest_that_waits(receiver: str, depth: int) -> None:
    backwards = "1B0,1SEND_B0,1B1,1SEND_B1,1B2,1SEND_B2"
    text = (
        "0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2,0RECV_B0,0B0,0RECV_B1,0B1,0RECV_B2,0B2,0REDUCE_GRAD,0STEP@1\n"
        f"{receiver},{backwards},1REDUCE_GRAD,1STEP@1"
    )
    channels = channels_of(Program.from_csv(text, placement=linear(2)))
    assert channels[0, 1, "activation"].depth == depth
    assert channels[1, 0, "gradient"].depth == 1
