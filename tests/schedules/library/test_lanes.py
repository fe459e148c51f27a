"""Lanes: what list scheduling sees of a pipeline, and how an order plays out."""

import pytest

from stagewright.schedules import Costs
from stagewright.schedules.library.lanes import computations, pipeline_of, span_and_makespan


def test_an_order_of_lanes_counts_microbatches() -> None:
    assert " ".join(map(str, computations([0, 0, 1, 2, 1, 2]))) == "0F0 0F1 0I0 0W0 0I1 0W1"
    assert " ".join(map(str, computations([3, 9, 10, 4, 11, 5]))) == "1F0 3F0 3I0 1I0 3W0 1W0"


def test_a_pipeline_is_read_off_costs() -> None:
    costs = Costs((1, 2), backward=(2, 5), recompute=0.5, send=0.25, message_bytes=3, bandwidth=4)
    pipeline = pipeline_of([0, 1], 3, costs, [6, 7], ([2, 3], [4, 5]))
    assert pipeline.durations == (1, 1.5, 1, 2, 3, 2.5)
    assert pipeline.stashes == (6, -2, -4, 8, -3, -5)
    assert pipeline.hops == (1, 1)
    assert pipeline_of([0, 1], 3, costs, [6, 7]).stashes == (1, 0, -1, 1, 0, -1)


def test_a_hop_within_a_rank_takes_no_time() -> None:
    pipeline = pipeline_of([0, 1, 1, 0], 1, Costs(send=2), [2, 2])
    assert pipeline.stages_of == ((0, 3), (1, 2))
    forwards = [(3, 2), (6, 0), (9, 2), (10, 0)]  # at the end of the V the first input gradient follows
    gradients = [(-1, 0), (1, 2), (4, 0), (7, 2)]
    assert [pipeline.followers[lane] for lane in (0, 3, 6, 9)] == forwards
    assert [pipeline.followers[lane] for lane in (1, 4, 7, 10)] == gradients
    assert {pipeline.followers[lane] for lane in (2, 5, 8, 11)} == {(-1, 0)}


def test_evening_out() -> None:
    pipeline = pipeline_of([0, 1], 1, Costs((1, 3), input_gradient=2, weight_gradient=2, send=4), [2, 2])
    assert pipeline.evened(0) == pipeline
    assert pipeline.evened(0.5).durations == (1.5, 2, 2, 2.5, 2, 2)
    assert pipeline.evened(0.5).hops == (2, 2)
    assert pipeline.evened(1) == pipeline_of([0, 1], 1, Costs(2), [2, 2])


def test_span_and_makespan() -> None:
    """Rank 1 starts at 1.5 and is busy to 5.5; rank 0 gets its gradient at 4 and is done at 6."""
    pipeline = pipeline_of([0, 1], 1, Costs(1, input_gradient=1, weight_gradient=(1, 2), send=0.5), [1, 1])
    assert span_and_makespan(pipeline, [[0, 1, 2], [3, 4, 5]]) == pytest.approx((6, 6))
    pipeline = pipeline_of([0, 1], 1, Costs(1, input_gradient=1, weight_gradient=(1, 4), send=0.5), [1, 1])
    assert span_and_makespan(pipeline, [[0, 1, 2], [3, 4, 5]]) == pytest.approx((6, 7.5))
