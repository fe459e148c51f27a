"""Circular waits, under each kind of sends, with the shortest circle rank by rank."""

import pytest
from programs import BOTH_WAYS, BOTH_WAYS_PLACEMENT, TWO_RANKS, assert_refused, program_of

from stagewright.schedules import Program, ScheduleError, create, verify
from stagewright.schedules.instructions import ReceiveActivation, ReceiveGradient
from stagewright.schedules.proof import SEMANTICS, Semantics
from stagewright.schedules.proof.deadlock import _shortest_circle


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_computations_that_wait_for_each_other_never_finish(semantics: Semantics) -> None:
    """Rank 0 wants the gradient of microbatch 0 before it makes the activation that rank 1 wants first."""
    program = program_of(
        TWO_RANKS,
        ("0F1,0SEND_F1,0RECV_B0,0B0,", "0RECV_B0,0B0,0F1,0SEND_F1,"),
        ("1B0,1SEND_B0,1F1,", "1F1,1B0,1SEND_B0,"),
    )
    assert_refused(
        program,
        "circular wait",
        f"under {semantics.replace('_', '-')} sends these ranks wait for each other:\n"
        "  rank 0: 0B0 (instruction 3) waits for rank 1: 1SEND_B0 (instruction 5)\n"
        "  rank 1: 1F1 (instruction 3) waits for rank 0: 0SEND_F1 (instruction 5)\n",
        semantics=semantics,
    )


def test_sends_that_wait_for_their_receives_can_wait_for_each_other() -> None:
    program = program_of(TWO_RANKS, ("1RECV_F1,1B0,1SEND_B0,1F1", "1B0,1SEND_B0,1RECV_F1,1F1"))
    verify(program, "buffered")
    verify(program, "in_order")
    assert_refused(
        program,
        "circular wait",
        """under rendezvous sends these ranks wait for each other:
  rank 0: 0SEND_F1 (instruction 3) waits for rank 1: 1RECV_F1 (instruction 4)
  rank 1: 1SEND_B0 (instruction 3) waits for rank 0: 0RECV_B0 (instruction 4)

  rank 0 | 0F0       0SEND_F0  0F1  [0SEND_F1]  0RECV_B0  0B0  0RECV_B1  …
  rank 1 | 1RECV_F0  1F0       1B0  [1SEND_B0]  1RECV_F1  1F1  1B1       …""",
    )


def receives_late(program: Program) -> Program:
    """Post each receive right before the computation that needs it."""
    streams = []
    for stream in program.streams:
        posted = {str(i).replace("RECV_", ""): i for i in stream if isinstance(i, ReceiveActivation | ReceiveGradient)}
        late = []
        for instruction in stream:
            if not isinstance(instruction, ReceiveActivation | ReceiveGradient):
                late += [posted[str(instruction)]] if str(instruction) in posted else []
                late.append(instruction)
        streams.append(tuple(late))
    return Program(tuple(streams), program.placement, program.num_microbatches)


def test_receives_right_before_their_use_stand_in_gpipe_only() -> None:
    verify(receives_late(create("gpipe", num_ranks=4, num_microbatches=8).program()), "rendezvous")
    late = receives_late(create("1f1b", num_ranks=4, num_microbatches=8).program())
    verify(late, "buffered")
    assert_refused(
        late,
        "circular wait",
        "  rank 2: 2SEND_F1 (instruction 5) waits for rank 3: 3RECV_F1 (instruction 4)\n"
        "  rank 3: 3SEND_B0 (instruction 3) waits for rank 2: 2RECV_B0 (instruction 6)\n",
    )


def test_a_fused_pair_waits_for_both_of_its_inputs() -> None:
    """Each rank's pair holds the forward that the other's backward comes from, two stages on."""
    text = """
0F0,0SEND_F0,0RECV_B0,(0F1;0B0)OVERLAP_F_B,0SEND_F1,0RECV_B1,0B1,0STEP@1
1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1STEP@1
"""
    assert_refused(program_of(text), "circular wait", "0F1;0B0)OVERLAP_F_B (instruction 3) waits for rank 1: 1SEND_B0")
    verify(program_of(text, ("1F1,1B0,1SEND_B0,", "1B0,1SEND_B0,1F1,")))


def test_a_step_waits_for_the_reductions_of_the_other_replicas() -> None:
    """Rank 0 keeps back a gradient that rank 1 needs before it can reduce."""
    early = "1B1,0RECV_B0,0B0,1REDUCE_GRAD,0REDUCE_GRAD,0STEP@1,1SEND_B1,1STEP@1"
    program = program_of(
        BOTH_WAYS,
        ("1B1,1SEND_B1,1REDUCE_GRAD,0RECV_B0,0B0,0REDUCE_GRAD,0STEP@1,1STEP@1", early),
        placement=BOTH_WAYS_PLACEMENT,
    )
    assert_refused(
        program,
        "circular wait",
        "rank 0: 0STEP@1 (instruction 9) waits for rank 1: 0REDUCE_GRAD (instruction 9)",
        "rank 1: 0B1 (instruction 8) waits for rank 0: 1SEND_B1 (instruction 10)",
    )


def test_scalars_wait_for_every_rank() -> None:
    """Rank 1 keeps back a gradient until after a step that needs the scalars which rank 0 makes of that gradient."""
    agreed = (("0B1,0STEP@1", "0B1,SYNC_SCALARS,0STEP@1"), ("1STEP@1", "SYNC_SCALARS,1STEP@1"))
    verify(program_of(TWO_RANKS, *agreed))
    program = program_of(TWO_RANKS, *agreed, ("1SEND_B1,SYNC_SCALARS,1STEP@1", "SYNC_SCALARS,1STEP@1,1SEND_B1"))
    assert_refused(
        program,
        "circular wait",
        "  rank 0: 0B1 (instruction 7) waits for rank 1: 1SEND_B1 (instruction 9)\n"
        "  rank 1: 1STEP@1 (instruction 8) waits for rank 0: SYNC_SCALARS (instruction 8)\n",
    )


def test_in_a_whole_pipeline_only_the_ranks_of_the_circle_are_named() -> None:
    texts = create("1f1b", num_ranks=8, num_microbatches=16).program().to_csv().splitlines()
    order = [token for token in texts[3].split(",") if token not in ("3RECV_B0", "3B0")]
    after = order.index("3SEND_F0") + 1
    order[after:after] = ["3RECV_B0", "3B0"]
    program = program_of("\n".join([*texts[:3], ",".join(order), *texts[4:]]))
    with pytest.raises(ScheduleError) as caught:
        verify(program, "buffered")
    waits = [line.split(" waits for ") for line in str(caught.value).splitlines() if " waits for " in line]
    assert [(waiting.split(" (")[0], awaited.split(" (")[0]) for waiting, awaited in waits] == [
        ("  rank 3: 3B0", "rank 4: 4SEND_B0"),
        ("  rank 4: 4F1", "rank 3: 3SEND_F1"),
    ]


def test_the_circle_is_a_shortest_one() -> None:
    edges = {0: {1: 10}, 1: {2: 20}, 2: {0: 5, 3: 30}, 3: {4: 40}, 4: {3: 31}, 5: {0: 1}}
    assert _shortest_circle(edges) == [(3, 40), (4, 31)]
    assert _shortest_circle({0: {1: 7}, 1: {2: 8}, 2: {0: 9}}) == [(0, 7), (1, 8), (2, 9)]
    assert _shortest_circle({0: {0: 3, 1: 4}, 1: {0: 1}}) == [(0, 3)]
