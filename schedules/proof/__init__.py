"""Proof: whether a program is legal, rule by rule."""

from typing import Final, Literal

from stagewright.schedules.communication import communicates, insert_communication
from stagewright.schedules.program import Program
from stagewright.schedules.proof.channels import check_channels
from stagewright.schedules.proof.completeness import check_completeness
from stagewright.schedules.proof.deadlock import check_deadlock
from stagewright.schedules.proof.production import check_production

Semantics = Literal["buffered", "rendezvous"]

# In this order: a later rule may rely on the earlier ones.
RULES: Final = (check_completeness, check_production, check_channels)


def verify(program: Program, semantics: Semantics = "rendezvous") -> None:
    """Prove that a program is legal.

    Args:
        program: any program, ours or imported; one without communication gets it inserted first.
        semantics: ``buffered``: a send is done at once; ``rendezvous``: only once its receive was posted, which is
            stricter.

    Raises:
        ScheduleError: the first broken rule, with the instruction that breaks it.
    """
    if not communicates(program):
        program = insert_communication(program)
    for rule in RULES:
        rule(program)
    check_deadlock(program, rendezvous=semantics == "rendezvous")
