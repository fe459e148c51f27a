"""The eight steps of DualPipe: a rank with two stages runs forwards of one beside backwards of the other."""

from collections import deque

from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.instructions import (
    Backward,
    Computation,
    Forward,
    InputGradient,
    Overlap,
    WeightGradient,
)
from stagewright.schedules.library.uniform import uniform


class Lane:
    """One of the two stages of a rank, and which of its microbatches comes next, forward and backward."""

    def __init__(self, stage: int, first_microbatch: int = 0) -> None:
        self.stage = stage
        self._next_forward = self._next_backward = first_microbatch

    def forward(self) -> Forward:
        """F of the next microbatch."""
        self._next_forward += 1
        return Forward(self.stage, self._next_forward - 1)

    def backward(self) -> Backward:
        """B of the next microbatch."""
        self._next_backward += 1
        return Backward(self.stage, self._next_backward - 1)


class DualOrder:
    """The order of one rank as it grows, and the weight gradients that it has put off, first in, first out."""

    def __init__(self) -> None:
        self.order: list[Computation | Overlap] = []
        self._delayed: deque[WeightGradient] = deque()

    def forward(self, lane: Lane) -> None:
        """Append F."""
        self.order.append(lane.forward())

    def backward(self, lane: Lane) -> None:
        """Append B."""
        self.order.append(lane.backward())

    def overlap(self, forward: Lane, backward: Lane) -> None:
        """Append F of one lane and B of the other as a fused pair."""
        self.order.append(Overlap(forward.forward(), backward.backward()))

    def input_gradient(self, lane: Lane) -> None:
        """Append I and put off its W."""
        whole = lane.backward()
        self.order.append(InputGradient(whole.stage, whole.microbatch))
        self._delayed.append(WeightGradient(whole.stage, whole.microbatch))

    def weight_gradient(self) -> None:
        """Append the W that has waited longest."""
        self.order.append(self._delayed.popleft())


def eight_steps(near: Lane, far: Lane, num_before: int, num_after: int, num_steady: int) -> list[Computation | Overlap]:
    """The order of one rank, by the rules of DualPipe's published ``step()``.

    Args:
        near: the lane of the rank's earlier stage.
        far: the lane of its later stage.
        num_before: ranks that a microbatch in ``near`` passes before it comes here.
        num_after: ranks that it passes after this one before it goes over to the ``far`` lanes.
        num_steady: rounds of the fourth step.
    """
    rank = DualOrder()
    num_shared = num_before + 1
    for _ in range(2 * num_after):  # 1: the near lane fills
        rank.forward(near)
    for _ in range(num_shared):  # 2: the far lane arrives
        rank.forward(near)
        rank.forward(far)
    for _ in range(num_after):  # 3: the far lane comes back; I first, so that the rank before can go on
        rank.input_gradient(far)
        rank.weight_gradient()
        rank.forward(far)
    for turn in range(num_steady):  # 4: forward of one lane beside backward of the other
        if turn == 0 and num_after == 0:  # not fused, so that the forward goes on before the backward is done
            rank.forward(near)
            rank.backward(far)
        else:
            rank.overlap(near, far)
        rank.overlap(far, near)
    for _ in range(num_after):  # 5: the near lane has no forwards left
        rank.backward(far)
        rank.overlap(far, near)
    for turn in range(2 * num_shared):  # 6: nor has the far one; from the middle on, W is put off
        lane = near if turn % 2 else far
        if turn < num_shared:
            rank.backward(lane)
        else:
            rank.input_gradient(lane)
    for _ in range(num_after):  # 7: W while the next near gradient is under way
        rank.weight_gradient()
        rank.input_gradient(near)
    for _ in range(num_shared):  # 8: what W are left
        rank.weight_gradient()
    return rank.order


def overlap_formula(
    text: str, num_gaps: int, num_pairs: int, num_computations: int, costs: Costs, num_stages: int
) -> Formula:
    """The idle time of the rank that has most: ``num_gaps`` times (F&B+B-3W).

    Args:
        text: the formula as one writes it.
        num_gaps: how often the gap occurs.
        num_pairs: fused pairs of that rank.
        num_computations: its forwards, and its backwards, over both lanes.
        costs: of one stage.
        num_stages: stages of the model.
    """
    stage, overlapped = uniform(costs, num_stages), costs.of_stages(num_stages).overlapped
    pair = stage.forward + stage.backward if overlapped is None else max(overlapped)
    ideal = num_pairs * pair + (num_computations - num_pairs) * (stage.forward + stage.backward)
    return Formula(text, num_gaps * (pair + stage.backward - 3 * stage.weight_gradient), ideal)
