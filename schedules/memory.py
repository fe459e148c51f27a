"""Memory: what a rank stashes in the course of time."""

from collections.abc import Sequence
from dataclasses import dataclass

from stagewright.schedules.costs import StageCosts
from stagewright.schedules.table import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Table


@dataclass(frozen=True)
class MemoryCurve:
    """The bytes that one rank stashes: ``values[i]`` from ``times[i]`` on, until ``times[i + 1]``; nothing before."""

    times: tuple[float, ...]
    values: tuple[float, ...]

    @property
    def peak(self) -> float:
        """The most bytes at any time."""
        return max(self.values, default=0.0)


def memory_curve(
    table: Table, rank: int, starts: Sequence[float], ends: Sequence[float], costs: StageCosts
) -> MemoryCurve:
    """Follow one rank's stash: a forward fills it from its start on, a gradient frees it at its end.

    A fused pair holds both of its microbatches until its end.
    """
    times: list[float] = []
    values: list[float] = []
    held = 0.0
    for row in range(table.first_row[rank], table.first_row[rank + 1]):
        operation, stage = table.operation[row], table.stage[row]
        if operation == FORWARD:
            time, change = starts[row], costs.activation_bytes[stage] + costs.weight_bytes[stage]
        elif operation == INPUT_GRADIENT:
            time, change = ends[row], -costs.activation_bytes[stage]
        elif operation == WEIGHT_GRADIENT:
            time, change = ends[row], -costs.weight_bytes[stage]
        elif operation == BACKWARD:
            time, change = ends[row], -costs.activation_bytes[stage] - costs.weight_bytes[stage]
        else:
            continue
        held += change
        if times and times[-1] == time and change > 0:
            values[-1] = held  # what was freed makes room for it at once
        elif change:
            times.append(time)
            values.append(held)
    return MemoryCurve(tuple(times), tuple(values))


def peak_stashes(table: Table) -> tuple[int, ...]:
    """The most stash entries (one stage, one microbatch; freed at W or B) that each rank ever holds."""
    peaks = []
    for rank in range(table.num_ranks):
        held = peak = 0
        for operation in table.operation[table.first_row[rank] : table.first_row[rank + 1]]:
            if operation == FORWARD:
                held += 1
                if held > peak:
                    peak = held
            elif operation in (WEIGHT_GRADIENT, BACKWARD):
                held -= 1
        peaks.append(peak)
    return tuple(peaks)
