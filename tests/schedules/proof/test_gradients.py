"""STEP number v applies the gradients of its microbatches, all of them and no others."""

import pytest
from programs import BOTH_WAYS, BOTH_WAYS_PLACEMENT, ONE_BY_ONE, TWO_RANKS, assert_refused, per_update, program_of

from stagewright.schedules import verify
from stagewright.schedules.placement import linear

# Two batches of two microbatches on one rank, on weights that may be one update old.
TWO_BATCHES = "0F0@0,0B0@0,0F1@0,0B1@0,0STEP@1,0F2@0,0B2@0,0F3@0,0B3@0,0STEP@2"


def test_a_step_before_the_last_of_its_gradients() -> None:
    assert_refused(
        program_of(TWO_RANKS, ("0B1,0STEP@1", "0STEP@1,0B1")),
        "gradient missing",
        "rank 0: 0STEP@1 (instruction 7) applies the gradient of rank 0: 0B1 (instruction 8), which is later",
    )


def test_a_step_waits_for_the_weight_gradient_not_only_for_the_input_gradient() -> None:
    assert_refused(
        program_of(TWO_RANKS, ("0B1,0STEP@1", "0I1,0STEP@1,0W1")), "gradient missing", "the gradient of rank 0: 0W1"
    )


def test_a_step_of_another_number_of_microbatches_than_declared() -> None:
    once = "0F0,0B0,0STEP@1,0F1,0B1,0F2,0B2"
    program = program_of(once, num_microbatches=3, rule=per_update(3, [1]))
    assert_refused(program, "gradient missing", "0STEP@1 (instruction 2) applies the gradient of rank 0: 0B1")
    program = program_of(ONE_BY_ONE, num_microbatches=3, rule=per_update(3, [1]))
    assert_refused(program, "gradient missing", "3 microbatches, 3 an update, make 1 update(s)")


def test_a_step_without_gradients() -> None:
    program = program_of(ONE_BY_ONE + ",0STEP@4", num_microbatches=1, rule=per_update(1, [1]))
    assert_refused(
        program,
        "gradient missing",
        "0STEP@4 (instruction 9) has no gradients to apply: 3 microbatches, 1 an update, make 3 update(s)",
    )


def test_gradients_that_nobody_applies() -> None:
    assert_refused(
        program_of(TWO_RANKS, (",1STEP@1", "")),
        "leftover",
        "the gradients of microbatches 0..1 on stage 1 are never applied: rank 1 has 0 of 1 STEPs",
        "[1STEP@1?]",
    )


def test_every_replica_steps() -> None:
    program = program_of(BOTH_WAYS.replace("0STEP@1,1STEP@1\n0F1", "1STEP@1\n0F1"), placement=BOTH_WAYS_PLACEMENT)
    assert_refused(program, "leftover", "microbatches 0..1 on stage 0 are never applied: rank 0 has 0 of 1 STEPs")


def test_microbatches_that_fill_no_update() -> None:
    text = "0F0,0B0,0F1,0B1,0STEP@1,0F2,0B2"
    program = program_of(text, placement=linear(1), rule=per_update(2, [1]))
    assert_refused(
        program, "leftover", "the last 1 microbatch(es) are never applied: 3 is no whole number of updates of 2"
    )


@pytest.mark.parametrize("buffers", [1, 2])
def test_a_gradient_of_the_next_update_needs_a_second_buffer_until_the_step(buffers: int) -> None:
    program = program_of(
        TWO_BATCHES,
        ("0STEP@1,0F2@0,0B2@0", "0F2@0,0B2@0,0STEP@1"),
        num_microbatches=2,
        rule=per_update(2, [2], staleness=1, buffers=buffers),
    )
    if buffers == 2:
        verify(program)
    else:
        message = (
            "0B2@0 (instruction 5) adds to the gradients of version 2 before rank 0: 0STEP@1 (instruction 6) frees one"
        )
        assert_refused(program, "gradient buffer", message)
