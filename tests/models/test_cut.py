"""How layers are divided into stages."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.models import layers_of_stage


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
