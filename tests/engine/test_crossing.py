"""What crosses a boundary: anything made of tensors, between ranks and on one, with the gradients of a plain loop."""

from typing import Any

import pytest
from crossing import SCENARIOS, train_all
from scenario import compare, train_plainly, train_rank

from stagewright.engine import launch_local
from stagewright.schedules import create

# Four stages over four ranks, over two with neighbours apart, over two with two of them together, and on one.
SCHEDULES = [
    ("1f1b", 4, {}),
    ("zb-h1", 4, {}),
    ("interleaved", 2, {"num_chunks": 2}),
    ("hanayo", 2, {}),
    ("dualpipev", 2, {}),
    ("dualpipe", 4, {}),
    ("interleaved-zb", 1, {"num_chunks": 4}),
]
MICROBATCHES = 8


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("name", "num_ranks", "options"), SCHEDULES, ids=[f"{name}-P{p}" for name, p, _ in SCHEDULES])
def test_crosses(scenario: str, name: str, num_ranks: int, options: dict[str, Any]) -> None:
    schedule = create(name, num_ranks=num_ranks, num_microbatches=MICROBATCHES, **options)
    assert schedule.num_stages == 4
    plain = train_plainly(SCENARIOS[scenario], 4, MICROBATCHES)
    results = launch_local(train_rank, num_ranks, backend="threads", args=(SCENARIOS[scenario], {"schedule": schedule}))
    compare(results, plain)


def test_crosses_between_processes() -> None:
    """With every boundary between two processes, and with one of them within each."""
    schedules = [
        create("interleaved", num_ranks=2, num_microbatches=MICROBATCHES, num_chunks=2),
        create("hanayo", num_ranks=2, num_microbatches=MICROBATCHES),
    ]
    results = launch_local(train_all, 2, args=(schedules,))
    for index, scenario in enumerate(SCENARIOS.values()):
        plain = train_plainly(scenario, 4, MICROBATCHES)
        for of_schedule in range(len(schedules)):
            compare([of_rank[of_schedule][index] for of_rank in results], plain)
