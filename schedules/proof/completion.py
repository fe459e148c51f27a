"""Completion: the updates and the communication that an imported program leaves out."""

from stagewright.schedules.communication import communicates, insert_communication
from stagewright.schedules.program import Program
from stagewright.schedules.proof.completeness import check_completeness
from stagewright.schedules.proof.deadlock import check_deadlock
from stagewright.schedules.proof.ownership import check_ownership
from stagewright.schedules.proof.production import check_production
from stagewright.schedules.updates import append_updates, has_updates


def complete(program: Program) -> Program:
    """The whole program: with one update a batch where it has none, with sends and receives where it has none.

    Raises:
        ScheduleError: its computations break a rule, so that no communication could be found for them.
    """
    silent = not communicates(program)
    if has_updates(program) and not silent:
        return program
    check_ownership(program)  # before anything is added, so that a refusal counts instructions as the file does
    check_completeness(program)
    if not has_updates(program):
        program = append_updates(program)
    if silent:
        check_production(program, communicates=False)
        check_deadlock(program, "buffered")
        program = insert_communication(program)
    return program
