"""Linearize: one order in which all ranks' rows can really run, or the rows at which they wait in a circle.

Such an order is the whole proof that a program cannot deadlock: every wait is for a row earlier in it. A
wait once satisfied stays so, hence a greedy walk that finds no order means that none exists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagewright.schedules.table import REDUCE_GRADIENT, REDUCE_TIED, STEP, SYNC_SCALARS, Table


@dataclass(frozen=True)
class Waits:
    """What each row waits for beyond its place in its own rank's stream.

    Args:
        first: ``first[row]`` is the row that must be done before this one runs, or -1.
        more: the further rows, for the few that wait for several.
    """

    first: Sequence[int]
    more: Mapping[int, Sequence[int]]

    def of(self, row: int) -> list[int]:
        """Every row that this one waits for."""
        first = [self.first[row]] if self.first[row] >= 0 else []
        return first + list(self.more.get(row, ()))


@dataclass(frozen=True)
class Stuck:
    """The walk came to a halt: ``blocked[rank]`` is the row at which each unfinished rank waits."""

    blocked: Mapping[int, int]


def waits_of(table: Table, *, rendezvous: bool = False) -> Waits:
    """Derive who waits for whom.

    A forward waits for the send of its activation, a backward for the send of its gradient; in a program
    without communication they wait for the computation itself. Under rendezvous sends, a send also waits
    until its receive was posted. A STEP waits for the reductions that its gradient takes part in, on all
    ranks that share them, and where there are scalars for those of every rank.
    """
    first = [-1] * len(table)
    width = table.num_microbatches
    for key, row in enumerate(table.forward):
        if row >= 0 and key >= width:
            received = table.receive_activation[key] >= 0
            first[row] = (table.send_activation if received else table.forward)[key - width]
    for key, row in enumerate(table.input_gradient[: len(table.forward) - width]):
        if row >= 0:
            received = table.receive_gradient[key] >= 0
            first[row] = (table.send_gradient if received else table.input_gradient)[key + width]
    if rendezvous:
        for key, row in enumerate(table.send_activation[: len(table.forward) - width]):
            if row >= 0:
                first[row] = table.receive_activation[key + width]
        for key, row in enumerate(table.send_gradient):
            if row >= 0 and key >= width:
                first[row] = table.receive_gradient[key - width]
    more: dict[int, list[int]] = {row: [first[row + 1]] for row in table.fused if first[row + 1] >= 0}
    for row, others in _waits_of_steps(table):
        if others:
            more.setdefault(row, []).extend(others)
    return Waits(first, more)


def _waits_of_steps(table: Table) -> list[tuple[int, list[int]]]:
    """Each STEP waits for what its turn needs of other ranks: the sums over replicas and ties, and the scalars."""
    reductions, tied = table.rows_of(REDUCE_GRADIENT), table.rows_of(REDUCE_TIED)
    scalars = list(table.rows_of(SYNC_SCALARS).values())
    replicas: dict[int, list[list[int]]] = {}
    for (_, stage), rows in reductions.items():
        replicas.setdefault(stage, []).append(rows)
    waits: list[tuple[int, list[int]]] = []
    for (rank, stage), steps in table.rows_of(STEP).items():
        together = replicas.get(stage, []) + scalars + (list(tied.values()) if (rank, stage) in tied else [])
        for turn, row in enumerate(steps):
            others = [rows[turn] for rows in together if turn < len(rows)]
            waits.append((row, [other for other in others if table.rank[other] != rank]))
    return waits


def linearize(table: Table, waits: Waits) -> list[int] | Stuck:
    """Order all rows so that each comes after its rank's earlier rows and after all that it waits for."""
    done = bytearray(len(table))
    waiting: dict[int, list[int]] = {}
    order: list[int] = []
    next_row = table.first_row[:-1]
    first, more = waits.first, waits.more
    ranks = list(range(table.num_ranks))[::-1]
    while ranks:
        rank = ranks.pop()
        row, end = next_row[rank], table.first_row[rank + 1]
        while row < end:
            awaited = first[row]
            if awaited >= 0 and not done[awaited]:
                waiting.setdefault(awaited, []).append(rank)
                break
            if row in more and (undone := [other for other in more[row] if not done[other]]):
                waiting.setdefault(undone[0], []).append(rank)
                break
            done[row] = 1
            order.append(row)
            if row in waiting:
                ranks += waiting.pop(row)
            row += 1
        next_row[rank] = row
    if len(order) == len(table):
        return order
    return Stuck({rank: row for rank, row in enumerate(next_row) if row < table.first_row[rank + 1]})
