"""Phases: the patterns of warmup, steady phase and cooldown that several schedules share.

Each takes the (stage, microbatch) cells of one rank, in the order of its forwards and in that of its
backwards, and how many forwards come before the pattern sets in.
"""

from collections.abc import Sequence
from typing import TypeAlias

from stagewright.schedules.instructions import Backward, Computation, Forward, InputGradient, WeightGradient

Cells: TypeAlias = Sequence[tuple[int, int]]


def one_forward_one_backward(forwards: Cells, backwards: Cells, num_warmup: int) -> list[Computation]:
    """Warmup: forwards. Steady: one forward, one backward. Cooldown: the remaining backwards."""
    num_steady = len(forwards) - num_warmup
    order: list[Computation] = []
    for cell in forwards[:num_warmup]:
        order += [Forward(*cell)]
    for index in range(num_steady):
        order += [Forward(*forwards[num_warmup + index]), Backward(*backwards[index])]
    for cell in backwards[num_steady:]:
        order += [Backward(*cell)]
    return order


def forward_then_gradients(forwards: Cells, backwards: Cells, num_warmup: int, num_deferred: int) -> list[Computation]:
    """Steady: a forward, an input gradient, and a weight gradient once more than ``num_deferred`` are pending."""
    num_steady = len(forwards) - num_warmup
    order: list[Computation] = []
    for cell in forwards[:num_warmup]:
        order += [Forward(*cell)]
    for index in range(num_steady):
        order += [Forward(*forwards[num_warmup + index]), InputGradient(*backwards[index])]
        if index >= num_deferred:
            order += [WeightGradient(*backwards[index - num_deferred])]
    return order + _drain(backwards, num_steady, max(num_steady - num_deferred, 0))


def gradients_then_forward(forwards: Cells, backwards: Cells, num_warmup: int, num_deferred: int) -> list[Computation]:
    """Steady: an input gradient, a weight gradient once more than ``num_deferred`` are pending, and a forward."""
    num_steady = len(forwards) - num_warmup
    order: list[Computation] = []
    for cell in forwards[:num_warmup]:
        order += [Forward(*cell)]
    for index in range(num_steady):
        order += [InputGradient(*backwards[index])]
        if index >= num_deferred:
            order += [WeightGradient(*backwards[index - num_deferred])]
        order += [Forward(*forwards[num_warmup + index])]
    return order + _drain(backwards, num_steady, max(num_steady - num_deferred, 0))


def _drain(backwards: Cells, num_inputs: int, num_weights: int) -> list[Computation]:
    """Cooldown: input and weight gradients by turns, as many as are left of the former, then the rest of the latter."""
    num_pairs = len(backwards) - num_inputs
    order: list[Computation] = []
    for index in range(num_pairs):
        order += [InputGradient(*backwards[num_inputs + index]), WeightGradient(*backwards[num_weights + index])]
    for cell in backwards[num_weights + num_pairs :]:
        order += [WeightGradient(*cell)]
    return order
