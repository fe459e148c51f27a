"""Two ranks that share several replicated stages reduce them in one order."""

from programs import BOTH_WAYS, BOTH_WAYS_PLACEMENT, assert_refused, program_of

from stagewright.schedules import verify


def test_both_replicas_in_the_other_order_are_legal() -> None:
    other = BOTH_WAYS.replace("1REDUCE_GRAD,", "").replace("0REDUCE_GRAD,", "0REDUCE_GRAD,1REDUCE_GRAD,")
    verify(program_of(other, placement=BOTH_WAYS_PLACEMENT))


def test_one_replica_in_another_order_than_the_other() -> None:
    first, second = BOTH_WAYS.strip().splitlines()
    second = second.replace("1REDUCE_GRAD,", "").replace("0REDUCE_GRAD,", "0REDUCE_GRAD,1REDUCE_GRAD,")
    assert_refused(
        program_of(f"{first}\n{second}", placement=BOTH_WAYS_PLACEMENT),
        "reduction order",
        "ranks 0 and 1 share stages 0, 1 and must reduce them in one order: rank 0: 1REDUCE_GRAD (instruction 6) meets "
        "rank 1: 0REDUCE_GRAD (instruction 8)",
    )


def test_ranks_that_share_one_stage_may_reduce_it_whenever_they_like() -> None:
    """Stage 0 on ranks 0 and 1, stage 1 on ranks 0 and 2: no two ranks share two stages."""
    text = """
0F0,1F0,1B0,0B0,1REDUCE_GRAD,0REDUCE_GRAD,0STEP@1,1STEP@1
0F1,0SEND_F1,0RECV_B1,0B1,0REDUCE_GRAD,0STEP@1
1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1STEP@1
"""
    verify(program_of(text))
    verify(program_of(text, ("1REDUCE_GRAD,0REDUCE_GRAD,", "0REDUCE_GRAD,1REDUCE_GRAD,")))
