"""Proof: whether a program is legal, rule by rule."""

from typing import Final

from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.program import Program
from stagewright.schedules.proof.channels import check_channels
from stagewright.schedules.proof.completeness import check_completeness
from stagewright.schedules.proof.completion import complete
from stagewright.schedules.proof.deadlock import Semantics, check_deadlock
from stagewright.schedules.proof.gradients import check_gradients
from stagewright.schedules.proof.ownership import check_ownership
from stagewright.schedules.proof.production import check_production
from stagewright.schedules.proof.reduction_order import check_reduction_order
from stagewright.schedules.proof.reductions import check_reductions
from stagewright.schedules.proof.sharding import check_sharding
from stagewright.schedules.proof.staleness import check_staleness
from stagewright.schedules.proof.steps import check_steps
from stagewright.schedules.proof.versions import check_versions

SEMANTICS: Final[tuple[Semantics, ...]] = ("buffered", "rendezvous", "in_order")

__all__ = ["RULES", "SEMANTICS", "Semantics", "complete", "verify"]

# In this order: a later rule relies on the earlier ones.
RULES: Final = (
    check_ownership,
    check_completeness,
    check_production,
    check_channels,
    check_sharding,
    check_steps,
    check_gradients,
    check_versions,
    check_staleness,
    check_reductions,
    check_reduction_order,
)


def verify(program: Program, semantics: Semantics = "rendezvous") -> None:
    """Prove that a program is legal.

    Args:
        program: any program, ours or imported; one without updates or communication gets them added first.
        semantics: ``buffered``: a send never waits; ``rendezvous``: it ends only once its receive was posted, which
            is stricter; ``in_order``: as on NCCL, it never holds up its rank, but each channel serves in order: its
            k-th send meets its k-th receive, and a receive posted ahead blocks those behind it.

    Raises:
        ScheduleError: the first broken rule, by its short name in ``rule``; the message draws the streams around
            the offence.
    """
    if semantics not in SEMANTICS:
        raise ScheduleError(f"sends are {', '.join(SEMANTICS)}: got semantics={semantics!r}")
    program = complete(program)
    for rule in RULES:
        rule(program)
    check_deadlock(program, semantics)
