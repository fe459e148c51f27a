"""The min-max cut is the best there is: held against all cuts."""

import math
import re
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.models import GPT, Cut, GPTConfig, LlamaConfig, cut_by_costs, cut_by_parameters, llama, min_max_sizes
from stagewright.models.cut import parts_of_transformer


def all_cuts(num_parts: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each stage at least one part, the first stages first as small as can be."""
    for inner in combinations(range(1, num_parts), num_stages - 1):
        yield tuple(end - start for start, end in pairwise((0, *inner, num_parts)))


def stage_costs(costs: list[int], sizes: tuple[int, ...]) -> list[int]:
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return [sum(costs[start : start + size]) for start, size in zip(starts, sizes)]


shapes = st.integers(1, 9).flatmap(
    lambda num_parts: st.tuples(
        st.lists(st.integers(0, 12), min_size=num_parts, max_size=num_parts), st.integers(1, num_parts)
    )
)


@given(shapes)
def test_no_cut_has_a_cheaper_dearest_stage_and_ties_go_as_documented(shape: tuple[list[int], int]) -> None:
    costs, num_stages = shape
    ranked = min(
        (max(of_stages), sum(cost * cost for cost in of_stages), sizes)
        for sizes in all_cuts(len(costs), num_stages)
        for of_stages in [stage_costs(costs, sizes)]
    )
    assert min_max_sizes(costs, num_stages) == ranked[2]


@given(shapes)
def test_every_part_is_on_exactly_one_stage_and_no_stage_is_empty(shape: tuple[list[int], int]) -> None:
    costs, num_stages = shape
    cut = Cut(min_max_sizes(costs, num_stages))
    assert cut.num_stages == num_stages
    assert [part for stage in range(num_stages) for part in cut.parts_of_stage(stage)] == list(range(len(costs)))


@given(
    st.lists(st.floats(0, 1e300, allow_subnormal=True), min_size=3, max_size=12),
    st.integers(1, 3),
    st.sampled_from([2.0**-40, 2.0**7]),
)
def test_rounding_decides_nothing(costs: list[float], num_stages: int, unit: float) -> None:
    """The best by exact arithmetic, and the same in another unit."""
    sizes = min_max_sizes(costs, num_stages)
    exact = [int(cost * 2.0**-100) if cost > 2.0**200 else 0 for cost in costs]
    if all(cost > 2.0**200 for cost in costs):
        assert sizes == min_max_sizes(exact, num_stages)
    if all(1e-200 < cost < 1e200 for cost in costs):
        assert sizes == min_max_sizes([cost * unit for cost in costs], num_stages)


@pytest.mark.parametrize(
    ("costs", "num_stages", "sizes"),
    [
        ([1, 1, 1, 1, 1, 1], 3, (2, 2, 2)),
        ([1, 1, 1, 1, 1], 4, (1, 1, 1, 2)),
        ([5, 1, 1, 1, 1], 2, (1, 4)),
        ([1, 1, 1, 1, 5], 2, (4, 1)),
        ([0.1] * 10, 5, (2, 2, 2, 2, 2)),
        ([9, 1, 1, 1, 1], 3, (1, 2, 2)),  # the dearest stage is as it is; the others are even all the same
        ([0, 0, 0], 3, (1, 1, 1)),
        ([7], 1, (1,)),
    ],
)
def test_cuts_one_can_check_by_eye(costs: list[float], num_stages: int, sizes: tuple[int, ...]) -> None:
    assert min_max_sizes(costs, num_stages) == sizes


def test_a_thousand_layers_on_a_hundred_stages_take_no_time() -> None:
    costs = [1.0 + math.sin(index) for index in range(1000)]
    sizes = min_max_sizes(costs, 100)
    assert sum(sizes) == 1000
    greatest = max(sum(costs[sum(sizes[:stage]) :][: sizes[stage]]) for stage in range(100))
    assert sum(costs) / 100 <= greatest <= sum(costs) / 100 + max(costs)


def test_embedding_and_head_count_and_may_stand_alone() -> None:
    parts = parts_of_transformer(4)
    assert cut_by_costs(parts, [1, 1, 1, 1, 1, 1], 2) == Cut((3, 3))
    assert cut_by_costs(parts, [0, 1, 1, 1, 1, 4], 2) == Cut((5, 1))
    assert cut_by_costs(parts, [4, 1, 1, 1, 1, 0], 2) == Cut((1, 5))
    assert cut_by_costs(parts, [0, 1, 1, 1, 1, 1], 2) == Cut((3, 3))


@pytest.mark.parametrize(
    ("costs", "num_stages", "message"),
    [
        ([1.0] * 6, 5, "every stage needs at least 1 layer: got 4 layers for 5 stages; use 5 or more layers, or fewer"),
        ([1.0] * 6, 0, "a model is cut into at least 1 stage: got 0"),
        ([1.0] * 4, 2, "got 4 costs for 6 parts, embedding to head; pass one for each, embedding and head too"),
        ([1.0, math.nan, 1, 1, 1, 1], 2, "a finite number of 0 or more: got nan for number 1"),
        ([1.0, 1, 1, 1, 1, math.inf], 2, "got inf for number 5"),
        ([1.0, 1, -1, 1, 1, 1], 2, "got -1 for number 2"),
    ],
)
def test_costs_that_cannot_be_cut_are_refused(costs: list[float], num_stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        cut_by_costs(parts_of_transformer(4), costs, num_stages)


def test_a_cut_by_parameters_weighs_embedding_and_head() -> None:
    model = GPT(GPTConfig(vocab_size=4096, num_layers=4, hidden_size=16, num_heads=2, sequence_length=8))
    embedding, layer, *_, head = model.num_parameters()
    assert embedding == (4096 + 8) * 16
    assert layer == 12 * 16 * 16 + 13 * 16
    assert head == 4096 * 16 + 2 * 16
    assert cut_by_parameters(model, 3) == Cut((1, 4, 1))
    assert cut_by_parameters(llama(LlamaConfig(vocab_size=2, num_layers=6)), 3) == Cut((3, 2, 3))
