"""Table: a program as columns of integers, which proof and simulation can loop over quickly.

A row is one atom: an instruction, or one half of a fused pair (the forward's row comes first). Rows are
numbered through, rank after rank; ``-1`` stands for "none".
"""

from collections.abc import Sequence
from typing import Final

from stagewright.schedules import instructions as ins
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.placement import Placement

# The operations as small integers. Up to BACKWARD they compute.
FORWARD: Final = 0
INPUT_GRADIENT: Final = 1
WEIGHT_GRADIENT: Final = 2
BACKWARD: Final = 3
SEND_ACTIVATION: Final = 4
RECEIVE_ACTIVATION: Final = 5
SEND_GRADIENT: Final = 6
RECEIVE_GRADIENT: Final = 7
UNSHARD: Final = 8
RESHARD: Final = 9
REDUCE_GRADIENT: Final = 10
REDUCE_TIED: Final = 11
SYNC_SCALARS: Final = 12
STEP: Final = 13
OVERLAP: Final = 14

OPERATIONS: Final[dict[type, int]] = {
    ins.Forward: FORWARD,
    ins.InputGradient: INPUT_GRADIENT,
    ins.WeightGradient: WEIGHT_GRADIENT,
    ins.Backward: BACKWARD,
    ins.SendActivation: SEND_ACTIVATION,
    ins.ReceiveActivation: RECEIVE_ACTIVATION,
    ins.SendGradient: SEND_GRADIENT,
    ins.ReceiveGradient: RECEIVE_GRADIENT,
    ins.Unshard: UNSHARD,
    ins.Reshard: RESHARD,
    ins.ReduceGradient: REDUCE_GRADIENT,
    ins.ReduceTied: REDUCE_TIED,
    ins.SyncScalars: SYNC_SCALARS,
    ins.Step: STEP,
    ins.Overlap: OVERLAP,
}


class Table:
    """The rows of a program, and for each (stage, microbatch) the row that does a thing to it.

    Attributes:
        rank, operation, stage, microbatch, version: one entry a row; -1 where it has none.
        position: the row's index in its rank's stream (both halves of a fused pair share one).
        first_row: ``first_row[rank] .. first_row[rank + 1]`` are the rows of a rank.
        fused: the rows that are the forward of a fused pair; the backward is the next row.
        forward, input_gradient, weight_gradient, send_activation, receive_activation, send_gradient, receive_gradient:
            the row that does it, indexed by ``stage * num_microbatches + microbatch``; a full backward is the row of
            both gradients.
        others: the rows that belong to no microbatch (STEP, REDUCE_GRAD, …), in order.
        repeated: the rows that do again what an earlier row has done.
        outside: the rows whose stage or microbatch does not exist.
    """

    def __init__(
        self, streams: Sequence[Sequence[ins.Instruction]], placement: Placement, num_microbatches: int
    ) -> None:
        self.placement = placement
        self.num_ranks = len(streams)
        self.num_stages = placement.num_stages
        self.num_microbatches = num_microbatches
        self.rank: list[int] = []
        self.operation: list[int] = []
        self.stage: list[int] = []
        self.microbatch: list[int] = []
        self.version: list[int] = []
        self.position: list[int] = []
        self.fused: set[int] = set()
        self.first_row = [0]
        for rank, stream in enumerate(streams):
            self._append(stream)
            num_rows = len(self.operation) - self.first_row[-1]
            self.rank += [rank] * num_rows
            self.first_row.append(self.first_row[-1] + num_rows)
        self._index()

    def __len__(self) -> int:
        return len(self.operation)

    def rows_of(self, operation: int) -> dict[tuple[int, int], list[int]]:
        """The rows of a STEP, REDUCE_GRAD, … by rank and stage, in order."""
        rows: dict[tuple[int, int], list[int]] = {}
        for row in self.others:
            if self.operation[row] == operation:
                rows.setdefault((self.rank[row], self.stage[row]), []).append(row)
        return rows

    def _append(self, stream: Sequence[ins.Instruction]) -> None:
        """Add one rank's rows."""
        for position, instruction in enumerate(stream):
            if isinstance(instruction, ins.Overlap):
                self.fused.add(len(self.operation))
                self._append_atom(instruction.forward, position)
                self._append_atom(instruction.backward, position)
            else:
                self._append_atom(instruction, position)

    def _append_atom(self, atom: ins.Instruction, position: int) -> None:
        operation = OPERATIONS.get(type(atom), -1)
        if operation < 0:
            raise ScheduleError(
                f"a stream consists of instructions: got {atom!r}, a {type(atom).__name__}", "instruction"
            )
        version = getattr(atom, "version", None) if operation <= BACKWARD or operation == STEP else None
        self.operation.append(operation)
        self.stage.append(getattr(atom, "stage", -1))
        self.microbatch.append(atom.microbatch if operation <= RECEIVE_GRADIENT else -1)  # type: ignore[union-attr]
        self.version.append(-1 if version is None else version)
        self.position.append(position)

    def _index(self) -> None:
        """Note for each (stage, microbatch) which row does what to it."""
        num_keys = self.num_stages * self.num_microbatches
        at = [[-1] * num_keys for _ in range(RECEIVE_GRADIENT + 1)]
        self.others: list[int] = []
        self.repeated: list[int] = []
        self.outside: list[int] = []
        num_stages, num_microbatches = self.num_stages, self.num_microbatches
        for row, (operation, stage, microbatch) in enumerate(zip(self.operation, self.stage, self.microbatch)):
            if operation > RECEIVE_GRADIENT:
                if operation == SYNC_SCALARS or 0 <= stage < num_stages:
                    self.others.append(row)
                else:
                    self.outside.append(row)
            elif not (0 <= stage < num_stages and 0 <= microbatch < num_microbatches):
                self.outside.append(row)
            else:
                key = stage * num_microbatches + microbatch
                for done in _EFFECTS[operation]:
                    if at[done][key] >= 0:
                        self.repeated.append(row)
                    else:
                        at[done][key] = row
        self.forward, self.input_gradient, self.weight_gradient = at[FORWARD], at[INPUT_GRADIENT], at[WEIGHT_GRADIENT]
        self.send_activation, self.receive_activation = at[SEND_ACTIVATION], at[RECEIVE_ACTIVATION]
        self.send_gradient, self.receive_gradient = at[SEND_GRADIENT], at[RECEIVE_GRADIENT]


# What an operation counts as in the index: a full backward makes both gradients.
_EFFECTS: Final = tuple(
    (INPUT_GRADIENT, WEIGHT_GRADIENT) if operation == BACKWARD else (operation,)
    for operation in range(RECEIVE_GRADIENT + 1)
)
