"""Ranks that share several replicated stages reduce them in one order: each reduction needs all of its replicas."""

from itertools import combinations

from stagewright.schedules.program import Program
from stagewright.schedules.proof.report import at_row, refusal
from stagewright.schedules.table import REDUCE_GRADIENT


def check_reduction_order(program: Program) -> None:
    """Refuse reductions that two ranks issue in different orders: on one stream each would wait for the other."""
    table = program.table
    issued: list[list[int]] = [[] for _ in range(program.num_ranks)]
    for row in table.others:
        if table.operation[row] == REDUCE_GRADIENT:
            issued[table.rank[row]].append(row)
    shared: dict[tuple[int, int], set[int]] = {}
    for stage in range(table.num_stages):
        for pair in combinations(table.placement.replicas_of(stage), 2):
            shared.setdefault(pair, set()).add(stage)
    for (one, other), stages in shared.items():
        here = [row for row in issued[one] if table.stage[row] in stages]
        there = [row for row in issued[other] if table.stage[row] in stages]
        for row, other_row in zip(here, there):
            if table.stage[row] != table.stage[other_row]:
                message = (
                    f"ranks {one} and {other} share stages {', '.join(map(str, sorted(stages)))} and must reduce them "
                    f"in one order: {at_row(program, row)} meets {at_row(program, other_row)}"
                )
                raise refusal(program, "reduction order", message, row, other_row)
