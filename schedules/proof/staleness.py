"""A gradient is applied to weights at most as many updates newer than its own as the program declares."""

from stagewright.schedules.program import Program
from stagewright.schedules.proof.report import at_row, refusal
from stagewright.schedules.proof.versions import newest_versions, versions_used


def check_staleness(program: Program) -> None:
    """Refuse gradients of versions older than ``max_staleness`` updates."""
    table, rule = program.table, program.updates
    used = versions_used(table, newest_versions(table))
    for key, row in enumerate(table.forward):
        applied_to = key % table.num_microbatches // rule.microbatches_per_update
        if applied_to - used[row] > rule.max_staleness:
            message = (
                f"{at_row(program, row)} uses weight version {used[row]}, but its gradient is applied to version "
                f"{applied_to}: {applied_to - used[row]} update(s) old where at most {rule.max_staleness} are allowed"
            )
            raise refusal(program, "staleness", message, row)
