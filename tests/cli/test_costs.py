"""Costs as the papers write them, read from a flag."""

import argparse

import pytest

from stagewright.cli.costs import add_costs, costs_of
from stagewright.schedules import Costs


@pytest.mark.parametrize(
    ("text", "costs"),
    [
        ("", Costs()),
        ("F=1,I=1.3,W=0.7,send=0.05", Costs(forward=1, input_gradient=1.3, weight_gradient=0.7, send=0.05)),
        ("F=1, B=2, F&B=2.4", Costs(forward=1, backward=2, overlapped=2.4)),
        ("F=1:1:1:2,B=2", Costs(forward=(1, 1, 1, 2), backward=2)),
        ("forward=3,step=.5", Costs(forward=3, step=0.5)),
    ],
)
def test_costs_are_read(text: str, costs: Costs) -> None:
    assert costs_of(text) == costs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F", "costs are written KIND=DURATION with KIND one of F, B, I, W, F&B"),
        ("X=1", "got 'X=1'"),
        ("F=fast", "a cost is a number from 0 up, or one a stage as in F=1:1:2: got 'F=fast'"),
        ("F=-1", "a cost is a number from 0 up"),
        ("F=inf", "a cost is a number from 0 up"),
        ("F=1,forward=2", "each kind has one cost: forward is given twice"),
        ("F=1::2", "a cost is a number from 0 up"),
    ],
)
def test_what_is_no_cost_is_refused(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        costs_of(text)
    assert message in str(refused.value)


def test_without_the_flag_the_costs_are_the_default() -> None:
    parser = argparse.ArgumentParser()
    add_costs(parser)
    assert parser.parse_args([]).costs == Costs()
    assert parser.parse_args(["--costs", "F=2"]).costs == Costs(forward=2)
