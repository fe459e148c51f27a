"""What stages cost: defaults, what follows from what, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from stagewright.schedules import Costs, ScheduleError


def test_by_default_each_gradient_takes_as_long_as_the_forward_and_one_stash_counts_one() -> None:
    stages = Costs().of_stages(2)
    assert stages.forward == stages.input_gradient == stages.weight_gradient == (1.0, 1.0)
    assert stages.backward == (2.0, 2.0)
    assert stages.overlapped is None
    assert stages.send == stages.transfer == stages.step == stages.reduce == stages.activation_bytes == (0.0, 0.0)
    assert stages.weight_bytes == (1.0, 1.0)


@pytest.mark.parametrize(
    ("costs", "input_gradient", "weight_gradient", "backward"),
    [
        (Costs(forward=3), 3, 3, 6),
        (Costs(backward=5), 2.5, 2.5, 5),
        (Costs(backward=5, input_gradient=4), 4, 1, 5),
        (Costs(backward=5, weight_gradient=4), 1, 4, 5),
        (Costs(forward=3, input_gradient=4), 4, 3, 7),
        (Costs(forward=3, weight_gradient=1), 3, 1, 4),
        # Measured costs need not add up: a full backward may be cheaper than its two halves.
        (Costs(backward=5, input_gradient=4, weight_gradient=2), 4, 2, 5),
        # What is recomputed is recomputed before the first gradient, and only once.
        (Costs(backward=5, input_gradient=4, weight_gradient=2, recompute=10), 14, 2, 15),
    ],
)
def test_what_is_left_out_follows_from_what_is_given(
    costs: Costs, input_gradient: float, weight_gradient: float, backward: float
) -> None:
    stages = costs.of_stages(1)
    assert stages.input_gradient == (input_gradient,)
    assert stages.weight_gradient == (weight_gradient,)
    assert stages.backward == (backward,)


def test_costs_may_differ_from_stage_to_stage() -> None:
    stages = Costs(forward=[1, 2, 3], backward=[2, 3, 5], send=[0.5, 1, 9], message_bytes=[4, 8, 9], bandwidth=2)
    resolved = stages.of_stages(3)
    assert resolved.forward == (1, 2, 3)
    assert resolved.input_gradient == resolved.weight_gradient == (1, 1.5, 2.5)
    assert resolved.send == (0.5, 1, 9)
    assert resolved.transfer == (2, 4, 4.5)


def test_costs_with_sequences_are_hashable() -> None:
    assert hash(Costs(forward=[1, 2])) == hash(Costs(forward=(1, 2)))


def test_a_share_of_a_stage_computes_updates_and_stashes_that_share_but_sends_as_much() -> None:
    half = Costs(forward=[2, 4], backward=6, send=0.5, message_bytes=10, bandwidth=4, step=1, reduce=3).scaled(0.5)
    assert half == Costs(
        forward=(1, 2), backward=3, send=0.5, message_bytes=10, bandwidth=4, step=0.5, reduce=1.5, weight_bytes=0.5
    )


def test_a_sequence_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ScheduleError, match="got 2 forward costs for 3 stages"):
        Costs(forward=[1, 2]).of_stages(3)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": -1}, "zero or more: got forward=-1"),
        ({"backward": [1, float("nan")]}, "got backward="),
        ({"send": float("inf")}, "finite"),
        ({"bandwidth": 0}, "above zero"),
    ],
)
def test_what_cannot_be_a_cost_is_refused(costs: dict[str, float], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Costs(**costs)


@pytest.mark.parametrize("kind", [list, tuple, numpy.array, numpy.float32, torch.tensor])
def test_numbers_of_any_library_are_taken(kind: Callable[[object], Any]) -> None:
    """As Python's own, so that costs are equal and hashable whatever they were read from."""
    if kind is not numpy.float32:
        assert Costs(forward=kind([1.0, 2.0])) == Costs(forward=(1, 2))
    if kind not in (list, tuple):
        assert Costs(forward=kind(3.0)) == Costs(forward=3)
        assert hash(Costs(forward=[kind(3.0), 2])) == hash(Costs(forward=(3, 2)))


@pytest.mark.parametrize("value", [None, "3", "34", {0: 1}, [None], ["1"], [[1]], object()])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"a cost is a number, or one a stage: got forward="):
        Costs(forward=value)


def test_a_half_is_at_most_the_whole() -> None:
    with pytest.raises(ScheduleError, match="got 2.0 of backward=1.0; give input_gradient and weight_gradient both"):
        Costs(backward=1, input_gradient=2).of_stages(3)
