"""How layers are divided into stages."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.models import Cut, Part, cut_by_counts, cut_evenly, layers_of_stage
from stagewright.models.cut import parts_of_transformer

DECODER = parts_of_transformer(6)
MEMBERS = tuple(map(Part, "012345"))


@pytest.mark.parametrize(
    ("num_layers", "cut"),
    [
        (4, "0 | 1 | 2 | 3"),
        (5, "0 | 1 | 2 3 | 4"),
        (6, "0 | 1 2 | 3 4 | 5"),
        (7, "0 1 | 2 3 | 4 5 | 6"),
        (8, "0 1 | 2 3 | 4 5 | 6 7"),
        (9, "0 1 | 2 3 | 4 5 6 | 7 8"),
        (10, "0 1 | 2 3 4 | 5 6 7 | 8 9"),
        (11, "0 1 2 | 3 4 5 | 6 7 8 | 9 10"),
    ],
)
def test_layers_on_four_stages(num_layers: int, cut: str) -> None:
    stages = [layers_of_stage(num_layers, 4, stage) for stage in range(4)]
    assert " | ".join(" ".join(map(str, layers)) for layers in stages) == cut


def test_two_stages_leave_the_extra_layer_with_the_embedding_not_with_the_head() -> None:
    assert [layers_of_stage(5, 2, stage) for stage in range(2)] == [range(3), range(3, 5)]


@given(num_stages=st.integers(1, 40), extra=st.integers(0, 200))
def test_every_layer_is_on_one_stage_in_order_and_stages_are_even_up_to_one(num_stages: int, extra: int) -> None:
    num_layers = num_stages + extra
    stages = [layers_of_stage(num_layers, num_stages, stage) for stage in range(num_stages)]
    assert [layer for layers in stages for layer in layers] == list(range(num_layers))
    sizes = [len(layers) for layers in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes), "the stage with the head and the loss never holds an extra layer"
    if sizes[0] > min(sizes):
        assert set(sizes[1:-1]) <= {sizes[0]}, "the stage with the embedding is the last to get an extra layer"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (3, 4, 0),
            "needs at least 1 layer: got 3 layers for 4 stages; use 4 or more layers, or fewer stages",
        ),
        ((4, 0, 0), "a model is cut into at least 1 stage: got 0; pass 1 or more stages"),
        ((4, 2, 2), "stages are numbered from 0 to 1: got stage 2 of 2"),
        ((4, 2, -1), "stages are numbered from 0 to 1: got stage -1 of 2"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        layers_of_stage(*shape)


def test_the_parts_of_a_decoder_are_embedding_layers_and_head() -> None:
    assert [part.name for part in parts_of_transformer(2)] == ["embedding", "layers.0", "layers.1", "head"]
    assert [part.kind for part in parts_of_transformer(2)] == ["embedding", "layer", "layer", "head"]


def test_counts_are_of_layers_and_the_ends_come_on_top() -> None:
    assert cut_by_counts(DECODER, [1, 3, 2]) == Cut((2, 3, 3))
    assert cut_by_counts(DECODER, [0, 6, 0]) == Cut((1, 6, 1))
    assert cut_by_counts(DECODER, [6]) == Cut((8,))
    assert cut_by_counts(MEMBERS, [1, 3, 2]) == Cut((1, 3, 2))
    assert [cut_by_counts(DECODER, [1, 3, 2]).parts_of_stage(stage) for stage in range(3)] == [
        range(2),
        range(2, 5),
        range(5, 8),
    ]


@given(num_stages=st.integers(1, 20), extra=st.integers(0, 40))
def test_the_even_cut_has_the_layers_of_each_stage(num_stages: int, extra: int) -> None:
    num_layers = num_stages + extra
    cut = cut_evenly(parts_of_transformer(num_layers), num_stages)
    parts = [part for stage in range(num_stages) for part in cut.parts_of_stage(stage)]
    assert parts == list(range(num_layers + 2))
    for stage in range(num_stages):
        layers = [part - 1 for part in cut.parts_of_stage(stage) if 1 <= part <= num_layers]
        assert layers == list(layers_of_stage(num_layers, num_stages, stage))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([2, 2], "got counts of 2, 2, together 4, for 6 layers; make them add up to 6"),
        ([7, -1], "got counts of 7, -1, together 6, for 6 layers"),
        ([], "got counts of no stage, together 0, for 6 layers"),
        ([3, 0, 3], "every stage holds a part of the model: got 0 for stage 1 of 3; give it a part, or cut into fewer"),
    ],
)
def test_counts_that_leave_a_stage_empty_or_a_layer_out_are_refused(counts: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        cut_by_counts(DECODER, counts)


def test_a_stage_without_a_layer_needs_something_else() -> None:
    with pytest.raises(ValueError, match="got 0 for stage 0 of 2"):
        cut_by_counts(MEMBERS, [0, 6])


def test_fewer_layers_than_stages_are_refused_whatever_else_there_is() -> None:
    with pytest.raises(ValueError, match="got 6 layers for 7 stages; use 7 or more layers, or fewer stages"):
        cut_evenly(DECODER, 7)


def test_a_cut_without_stages_and_a_stage_that_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="cut into at least 1 stage: got 0"):
        Cut(())
    with pytest.raises(ValueError, match="numbered from 0 to 1: got stage 2 of 2"):
        Cut((1, 1)).parts_of_stage(2)
