"""The eight steps of DualPipe: a rank with two stages runs forwards of one beside backwards of the other."""

from collections import deque

from stagewright.schedules.instructions import (
    Backward,
    Computation,
    Forward,
    InputGradient,
    Overlap,
    WeightGradient,
)


class Lane:
    """One of the two stages of a rank, and which of its microbatches comes next, forward and backward."""

    def __init__(self, stage: int, first_microbatch: int = 0) -> None:
        self.stage = stage
        self.forwards = self.backwards = first_microbatch

    def forward(self) -> Forward:
        """F of the next microbatch."""
        self.forwards += 1
        return Forward(self.stage, self.forwards - 1)

    def backward(self) -> Backward:
        """B of the next microbatch."""
        self.backwards += 1
        return Backward(self.stage, self.backwards - 1)


class DualOrder:
    """The order of one rank as it grows, with the weight gradients that it still owes."""

    def __init__(self) -> None:
        self.order: list[Computation | Overlap] = []
        self._owed: deque[WeightGradient] = deque()

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
        """Append I and owe its W."""
        whole = lane.backward()
        self.order.append(InputGradient(whole.stage, whole.microbatch))
        self._owed.append(WeightGradient(whole.stage, whole.microbatch))

    def weight_gradient(self) -> None:
        """Append the W owed longest."""
        self.order.append(self._owed.popleft())


def eight_steps(near: Lane, far: Lane, num_before: int, num_after: int, num_steady: int) -> list[Computation | Overlap]:
    """The order of one rank: the eight steps of DualPipe's published ``step()``.

    Args:
        near: the lane of the rank's earlier stage.
        far: the lane of its later stage.
        num_before: ranks that a microbatch of ``near`` passes before it comes here.
        num_after: ranks that it passes after this one until it is on its way back (V) or in the other half.
        num_steady: rounds of the fourth step.
    """
    rank = DualOrder()
    num_shared = num_before + 1

    for _ in range(2 * num_after):  # 1: fill
        rank.forward(near)
    for _ in range(num_shared):  # 2: the far lane arrives
        rank.forward(near)
        rank.forward(far)
    for _ in range(num_after):  # 3: and turns back; W at once, for nothing else is there to do
        rank.input_gradient(far)
        rank.weight_gradient()
        rank.forward(far)
    for turn in range(num_steady):  # 4: steady
        if turn == 0 and num_after == 0:  # apart, so that the forward goes on before the backward is done
            rank.forward(near)
            rank.backward(far)
        else:
            rank.overlap(near, far)
        rank.overlap(far, near)
    for _ in range(num_after):  # 5: the near lane has no forward left
        rank.backward(far)
        rank.overlap(far, near)
    for turn in range(2 * num_shared):  # 6: drain; from the middle on W waits, so that I goes on sooner
        lane = near if turn % 2 else far
        if turn < num_shared:
            rank.backward(lane)
        else:
            rank.input_gradient(lane)
    for _ in range(num_after):  # 7: W where one waits for the next near gradient
        rank.weight_gradient()
        rank.input_gradient(near)
    for _ in range(num_shared):  # 8: the W still owed
        rank.weight_gradient()
    return rank.order
