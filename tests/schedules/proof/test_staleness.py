"""How old the weights of a gradient may be when it is applied."""

import pytest
from programs import assert_refused, per_update, program_of

from stagewright.schedules import Program, UpdateRule, create, verify

# Batch t of two microbatches runs on version max(t - 1, 0).
ONE_OLD = "0F0@0,0B0@0,0F1@0,0B1@0,0STEP@1,0F2@0,0B2@0,0F3@0,0B3@0,0STEP@2,0F4@1,0B4@1,0F5@1,0B5@1,0STEP@3"


def test_within_the_bound() -> None:
    verify(program_of(ONE_OLD, num_microbatches=2, rule=per_update(2, [2], staleness=1)))
    verify(program_of(ONE_OLD, num_microbatches=2, rule=per_update(2, [2], staleness=5)))


def test_above_the_bound() -> None:
    assert_refused(
        program_of(ONE_OLD, num_microbatches=2, rule=per_update(2, [2], staleness=0)),
        "staleness",
        "0F2@0 (instruction 5) uses weight version 0, but its gradient is applied to version 1: 1 update(s) old where "
        "at most 0 are allowed",
    )
    later = program_of(
        ONE_OLD, ("0F4@1,0B4@1", "0F4@0,0B4@0"), num_microbatches=2, rule=per_update(2, [3], staleness=1)
    )
    assert_refused(later, "staleness", "0F4@0 (instruction 10) uses weight version 0", "2 update(s) old")


def test_a_synchronous_batch_begins_with_the_weights_that_the_batch_before_made() -> None:
    program = program_of("0F0,0B0,0F1,0STEP@1,0B1,0STEP@2", num_microbatches=1, rule=per_update(1, [2]))
    assert_refused(program, "version mismatch")
    named = program_of("0F0,0B0,0F1@0,0STEP@1,0B1@0,0STEP@2", num_microbatches=1, rule=per_update(1, [2]))
    assert_refused(named, "staleness", "0F1@0 (instruction 2) uses weight version 0")


@pytest.mark.parametrize(("name", "bound"), [("2bw", 1), ("pipedream", 3)])
def test_asynchronous_schedules_declare_the_least_bound_that_holds(name: str, bound: int) -> None:
    program = create(name, num_ranks=4, num_microbatches=8).program(3)
    rule = program.updates
    assert rule.max_staleness == bound
    tighter = UpdateRule(rule.microbatches_per_update, rule.num_versions, bound - 1)
    broken = Program(program.streams, program.placement, program.num_microbatches, program.num_batches, tighter)
    assert_refused(broken, "staleness")
