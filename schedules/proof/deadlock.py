"""No circular wait: there is an order in which every rank can run its whole stream."""

from collections import deque
from typing import Literal

from stagewright.schedules.linearize import Stuck, Waits, linearize, waits_of
from stagewright.schedules.program import Program
from stagewright.schedules.proof.report import at_row, refusal
from stagewright.schedules.table import Table

Semantics = Literal["buffered", "rendezvous", "in_order"]


def check_deadlock(program: Program, semantics: Semantics) -> None:
    """Refuse a circular wait, and show a shortest circle rank by rank.

    In-order streams wait as buffered ones do: the channels are in order already, so the receives in front of
    a receive are posted by its own rank and served by earlier sends of the same rank.
    """
    table = program.table
    waits = waits_of(table, rendezvous=semantics == "rendezvous")
    stuck = linearize(table, waits)
    if not isinstance(stuck, Stuck):
        return
    circle = _shortest_circle(_edges(table, waits, stuck))
    lines = [f"  {at_row(program, stuck.blocked[rank])} waits for {at_row(program, row)}" for rank, row in circle]
    kind = semantics.replace("_", "-")
    message = f"under {kind} sends these ranks wait for each other:"
    raise refusal(program, "circular wait", "\n".join([message, *lines]), *(stuck.blocked[rank] for rank, _ in circle))


def _edges(table: Table, waits: Waits, stuck: Stuck) -> dict[int, dict[int, int]]:
    """``edges[rank][other]``: the row of the other rank that a blocked rank waits for."""
    edges: dict[int, dict[int, int]] = {}
    for rank, row in stuck.blocked.items():
        undone = [other for other in waits.of(row) if other >= stuck.blocked.get(table.rank[other], len(table))]
        edges[rank] = {table.rank[other]: other for other in undone}
    return edges


def _shortest_circle(edges: dict[int, dict[int, int]]) -> list[tuple[int, int]]:
    """The fewest ranks that wait for each other: each with the row that it waits for, in the order of waiting."""
    circles = [circle for start in edges if (circle := _circle_through(edges, start))]
    return min(circles, key=len)


def _circle_through(edges: dict[int, dict[int, int]], start: int) -> list[tuple[int, int]]:
    """A shortest way along the waits from a rank back to itself; empty where there is none."""
    came_from: dict[int, int] = {}
    queue = deque([start])
    while queue:
        rank = queue.popleft()
        for other in edges[rank]:
            if other == start:
                way = [(rank, edges[rank][other])]
                while rank != start:
                    rank, target = came_from[rank], rank
                    way.append((rank, edges[rank][target]))
                return way[::-1]
            if other not in came_from:
                came_from[other] = rank
                queue.append(other)
    return []
