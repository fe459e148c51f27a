"""Causes: what each row of a timeline waited for, and the chain of such waits that makes a step as long as it is."""

from collections.abc import Sequence
from math import inf

from stagewright.schedules.linearize import Waits
from stagewright.schedules.table import (
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    REDUCE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    STEP,
    Table,
)
from stagewright.schedules.timing import ASYNCHRONOUS, channel_of

# What a rank passes without being kept busy by it.
_PASSED = ASYNCHRONOUS | {RECEIVE_ACTIVATION, RECEIVE_GRADIENT}


class Causes:
    """What the rows of a timeline, simulated or measured, waited for.

    Args:
        table: the rows.
        waits: what they may have had to wait for on other ranks.
        starts, ends: one entry a row.
    """

    def __init__(self, table: Table, waits: Waits, starts: Sequence[float], ends: Sequence[float]) -> None:
        self._table = table
        self._waits = waits
        self._starts = starts
        self._ends = ends
        self._reduced_by: dict[int, int] = {}  # the reduction on the same rank that a STEP needs
        self._replicas: dict[int, list[int]] = {}  # the same reduction on the other ranks
        own: dict[tuple[int, int], int] = {}
        for row in table.others:
            place = (table.rank[row], table.stage[row])
            if table.operation[row] == REDUCE_GRADIENT:
                own[place] = row
            elif table.operation[row] == STEP and place in own:
                self._reduced_by[row] = own.pop(place)
                self._replicas[self._reduced_by[row]] = [
                    other for other in waits.more.get(row, ()) if table.operation[other] == REDUCE_GRADIENT
                ]

    def previous(self, row: int) -> int:
        """The row that kept this one's rank busy before it, or -1."""
        table = self._table
        first = table.first_row[table.rank[row]]
        row = self._whole(row) - 1
        while row >= first and table.operation[row] in _PASSED:
            row -= 1
        return row if row >= first else -1

    def of(self, row: int) -> int:
        """The row that this one waited for, or -1: the last to end of all that had to be done before it.

        Where its own rank was busy as long as anything else took, that is the cause.
        """
        row = self._whole(row)
        previous = self.previous(row)
        later = [other for other in self._awaited(row) if self._end(other) > self._end(previous)]
        return max(later, key=self._end, default=previous)

    def chain(self) -> list[int]:
        """The rows that make the whole as long as it is, first to last: each waited for the one before."""
        operation = self._table.operation
        rows = [row for row in range(len(self._table)) if not SEND_ACTIVATION <= operation[row] <= RECEIVE_GRADIENT]
        row = max(reversed(rows), key=self._ends.__getitem__, default=-1)
        chain = []
        while row >= 0:
            chain.append(row)
            row = self.of(row)
        return chain[::-1]

    def _awaited(self, row: int) -> list[int]:
        """All that had to be done before a row, other than what its rank computes."""
        operation = self._table.operation[row]
        if operation in (SEND_ACTIVATION, SEND_GRADIENT):
            return self._ahead(row) if self._starts[row] > self._end(self.previous(row)) else []
        if operation == REDUCE_GRADIENT:
            return [self.previous(other) for other in self._replicas.get(row, ())]
        awaited = self._waits.of(row)
        return [*awaited, self._reduced_by[row]] if row in self._reduced_by else awaited

    def _ahead(self, row: int) -> list[int]:
        """The message before this one on its channel, if there is one."""
        table = self._table
        channel = channel_of(table, row)
        for other in range(row - 1, table.first_row[table.rank[row]] - 1, -1):
            if table.operation[other] == table.operation[row] and channel_of(table, other) == channel:
                return [other]
        return []

    def _whole(self, row: int) -> int:
        """The first row of the instruction that a row belongs to: a fused pair waits for all that either half needs."""
        return row - 1 if row - 1 in self._table.fused else row

    def _end(self, row: int) -> float:
        return self._ends[row] if row >= 0 else -inf
