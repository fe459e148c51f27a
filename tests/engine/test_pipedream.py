"""PipeDream trains as a plain loop does that steps after every microbatch, by gradients of the weights it began on."""

from collections.abc import Iterator, Sequence
from typing import Any, get_args

import pytest
from delayed import OPTIMIZERS, Action, Case, assert_same, label, train_delayed, train_many, train_rank
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import launch_on

from stagewright.engine import launch_local

STASHING: dict[str, Any] = {}
SYNCING: dict[str, Any] = {"vertical_sync": True}
ACTIONS: Sequence[Action] = get_args(Action)


def assert_trains_as_plainly(case: Case) -> None:
    assert_same(launch_local(train_rank, case.num_ranks, backend="threads", args=(case,)), train_delayed(case))


VARIANTS: Sequence[dict[str, Any]] = [
    {"optimizer": "sgd"},
    {"optimizer": "momentum", "decays": True, "actions": {0: "flush", 3: "evaluate"}},
    {"optimizer": "adam", "model": "dropout", "recompute": "full", "actions": {2: "save"}},
    {"optimizer": "adamw", "decays": True, "actions": {1: "predict"}},
]


def cases() -> Iterator[Case]:
    """From fewer microbatches than fill the pipeline, where a window has no backward yet, to some more than ranks."""
    index = 0
    for num_ranks in range(1, 5):
        for num_microbatches in sorted({1, max(num_ranks - 1, 1), num_ranks, num_ranks + 2}):
            for options in (STASHING, SYNCING):
                yield Case(num_ranks, num_microbatches, "pipedream", options, 7, **VARIANTS[index % len(VARIANTS)])
                index += 1
            index += 1


@pytest.mark.parametrize("case", list(cases()), ids=label)
def test_equals_the_plain_loop(case: Case) -> None:
    assert_trains_as_plainly(case)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [STASHING, SYNCING], ids=["stashing", "syncing"])
def test_equals_the_plain_loop_in_every_way(num_ranks: int, options: dict[str, Any]) -> None:
    for num_microbatches in range(1, num_ranks + 3):
        for variant in VARIANTS:
            for optimizer in OPTIMIZERS:
                more = {**variant, "optimizer": optimizer}
                assert_trains_as_plainly(Case(num_ranks, num_microbatches, "pipedream", options, 7, **more))


@settings(max_examples=15, deadline=None)
@given(
    shape=st.sampled_from([(1, 1), (2, 1), (2, 3), (3, 1), (3, 4)]),
    options=st.sampled_from([STASHING, SYNCING]),
    actions=st.dictionaries(st.integers(0, 5), st.sampled_from(ACTIONS), max_size=4),
)
def test_after_a_drain_it_begins_on_the_newest_weights(
    shape: tuple[int, int], options: dict[str, Any], actions: dict[int, Action]
) -> None:
    """Its delays grow again from 0, other than those of 2BW."""
    assert_trains_as_plainly(Case(*shape, "pipedream", options, 6, actions=actions))


def test_equals_the_plain_loop_in_processes() -> None:
    several = [Case(3, count, "pipedream", options, 5) for count in (1, 4) for options in (STASHING, SYNCING)]
    results = launch_on("gloo", train_many, 3, (several,))
    for index, case in enumerate(several):
        assert_same([of_rank[index] for of_rank in results], train_delayed(case))
