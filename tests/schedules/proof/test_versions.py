"""Which weight version a computation reads: it exists, and is the same forward and backward."""

import pytest
from programs import TWO_RANKS, assert_refused, per_update, program_of

from stagewright.schedules import create, verify
from stagewright.schedules.instructions import Backward, Forward, Instruction, Step
from stagewright.schedules.placement import linear
from stagewright.schedules.program import Program, UpdateRule

# Three updates of one microbatch, the backward one microbatch behind the forward, two versions kept.
STASHED = "0F0@0,0F1@0,0B0@0,0STEP@1,0F2@1,0B1@0,0STEP@2,0B2@1,0STEP@3"


def stashed(*changes: tuple[str, str], versions: int = 2) -> Program:
    return program_of(STASHED, *changes, num_microbatches=1, rule=per_update(1, [versions], staleness=1))


def test_stashed_versions_are_legal() -> None:
    verify(stashed())
    verify(stashed(versions=3))


@pytest.mark.parametrize(
    ("changes", "versions", "rule", "message"),
    [
        (
            [("0F1@0", "0F1@1")],
            2,
            "version not made",
            "0F1@1 (instruction 1) reads weight version 1, while the newest is 0",
        ),
        (
            [("0B2@1", "0B2@3")],
            2,
            "version not made",
            "0B2@3 (instruction 7) reads weight version 3, while the newest is 2",
        ),
        (
            [],
            1,
            "version overwritten",
            "0B1@0 (instruction 5) reads weight version 0, which was overwritten: the newest is 1",
        ),
        ([("0B2@1", "0B2@0")], 2, "version overwritten", "the newest is 2, and rank 0 keeps 2"),
        ([("0B1@0", "0B1@1")], 2, "version mismatch", "0B1@1 (instruction 5) uses weight version 1, but its forward"),
        ([("0F1@0", "0F1"), ("0B1@0", "0B1")], 2, "version mismatch", "rank 0: 0F1 (instruction 1), used version 0"),
        ([("0B2@1", "0I2@1,0W2@2")], 2, "version mismatch", "0W2@2 (instruction 8) uses weight version 2"),
        ([("0B2@1", "0I2@2,0W2@1")], 2, "version mismatch", "0I2@2 (instruction 7) uses weight version 2"),
    ],
)
def test_versions_that_cannot_be(changes: list[tuple[str, str]], versions: int, rule: str, message: str) -> None:
    assert_refused(stashed(*changes, versions=versions), rule, message)


def test_without_a_version_the_newest_is_meant() -> None:
    verify(program_of(TWO_RANKS, ("0F0", "0F0@0")))
    verify(stashed(("0F2@1", "0F2")))
    batches = "0F0,0B0,0STEP@1,0F1,0B1@1,0STEP@2"
    verify(program_of(batches, num_microbatches=1))
    between = "0F0,0F1,0B0,0STEP@1,0B1,0STEP@2"
    program = program_of(between, num_microbatches=1, rule=per_update(1, [2], staleness=1))
    assert_refused(program, "version mismatch", "rank 0: 0B1 (instruction 4) uses weight version 1, but its forward")


def macrobatch(num_ranks: int, num_microbatches: int, num_batches: int) -> Program:
    """PipeDream's ``--macrobatch`` mode: 1F1B without a flush, an update every M backwards, nothing stashed.

    Forward and backward both read the newest weights.
    """
    streams: list[tuple[Instruction, ...]] = []
    total = num_microbatches * num_batches
    for rank in range(num_ranks):
        num_warmup = num_ranks - 1 - rank
        stream: list[Instruction] = []
        newest = 0
        for turn in range(total + num_warmup):
            if turn < total:
                stream.append(Forward(rank, turn, newest))
            if turn >= num_warmup:
                stream.append(Backward(rank, turn - num_warmup, newest))
                if (turn - num_warmup + 1) % num_microbatches == 0:
                    newest += 1
                    stream.append(Step(rank, newest))
        streams.append(tuple(stream))
    rule = UpdateRule(num_microbatches, (1,) * num_ranks, max_staleness=1)
    return Program(tuple(streams), linear(num_ranks), num_microbatches, num_batches, rule)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 2), (4, 4), (4, 8)])
def test_the_peer_fault_of_pipedreams_macrobatch_mode(num_ranks: int, num_microbatches: int) -> None:
    """It saves the stashed versions by giving up that a microbatch goes back through the weights it came by."""
    program = macrobatch(num_ranks, num_microbatches, num_batches=2)
    first = num_microbatches  # in flight on rank 0 while its first update comes
    assert_refused(
        program,
        "version mismatch",
        f"rank 0: 0B{first}@1 ",
        f"uses weight version 1, but its forward, rank 0: 0F{first}@0 ",
    )
    whole = create("pipedream", num_ranks=num_ranks, num_microbatches=num_microbatches).program(2)
    verify(whole)


def test_the_macrobatch_mode_is_right_on_the_last_rank_alone() -> None:
    verify(macrobatch(1, 4, num_batches=3))
