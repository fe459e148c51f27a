"""2BW over device communicators: they know no sizes, so layouts travel from host to host, and only at first."""

from typing import Any

import pytest
from counting import CountingTransport
from delayed import Case, Trained, assert_same, label, train_delayed, train_rank
from nccl_double import transports_on_double

from stagewright.engine import RankContext
from stagewright.engine.launch.threads import run_threads
from stagewright.engine.transport.hub import Hub


def on_double(case: Case) -> tuple[list[Trained], list[int]]:
    """Train over doubled communicators; also, how many layouts each rank's host has sent."""
    hub = Hub(case.num_ranks)
    transports = transports_on_double(hub, CountingTransport)
    results = run_threads(train_rank, hub, transports, (case,))
    hosts: Any = [transport.host for transport in transports]
    return results, [sum(kind in ("activation", "gradient") for kind, _ in host.sent) for host in hosts]


SHAPES = [(2, 1), (2, 3), (3, 2), (4, 3), (4, 5)]
CASES = [
    Case(num_ranks, num_microbatches, rows=2 * num_microbatches + 1, num_batches=8, actions=actions)
    for num_ranks, num_microbatches in SHAPES
    for actions in ({}, {2: "flush", 3: "flush"})
]
CASES += [
    Case(3, 1, "pipedream", rows=2, num_batches=9),
    Case(4, 1, "pipedream", {"vertical_sync": True}, rows=2, num_batches=9),
    Case(3, 3, rows=7, model="tied", max_norm=0.3),
]


@pytest.mark.parametrize("case", CASES, ids=label)
def test_layouts_travel_with_the_first_batches_only(case: Case) -> None:
    """A second batch's, at most, where its message is posted before the first one's has been taken."""
    results, num_layouts = on_double(case)
    assert_same(results, train_delayed(case))
    neighbours = [min(rank + 1, case.num_ranks - 1) - max(rank - 1, 0) for rank in range(case.num_ranks)]
    first = [case.num_microbatches * count for count in neighbours]
    for rank, count in enumerate(num_layouts):
        assert first[rank] <= count <= max(2, case.num_microbatches) / case.num_microbatches * first[rank]


def change_rows(context: RankContext, options: dict[str, Any]) -> Trained:
    return train_rank(context, Case(2, 2, options=options))


def test_other_rows_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"keeps its shapes after the first step: .* give the Pipeline dynamic_shapes"):
        on_double(Case(2, 2, options={"dynamic_shapes": False}))


def test_shapes_may_change_where_that_was_said() -> None:
    case = Case(3, 3, actions={2: "evaluate"})
    results, num_layouts = on_double(case)
    assert_same(results, train_delayed(case))
    assert min(num_layouts) >= case.num_batches * case.num_microbatches
