"""How layers are divided into stages."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stagewright.models import (
    GPT,
    Cut,
    GPTConfig,
    Part,
    Profile,
    build_stage,
    cut_by_costs,
    cut_by_counts,
    cut_by_layout,
    cut_by_parameters,
    cut_by_profile,
    cut_evenly,
    layers_of_stage,
    layout_of,
    min_max_sizes,
)
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
        ([7, -1], "every stage has at least 1 layer: got -1 for stage 1 in counts of 7, -1; give it one,"),
        ([], "a model is cut into at least 1 stage: got 0"),
        ([3, 0, 3], "every stage has at least 1 layer: got 0 for stage 1 in counts of 3, 0, 3; give it one"),
        (
            [0, 6],
            "got 0 for stage 0 in counts of 0, 6; give it one, cut into fewer stages, or write a layout ",
        ),
        (
            [1] * 6 + [0],
            "every stage needs at least 1 layer: got 6 layers for 7 stages; use 7 or more layers, or fewer",
        ),
    ],
)
def test_counts_that_leave_a_stage_empty_or_a_layer_out_are_refused(counts: list[int], message: str) -> None:
    for parts in (DECODER, MEMBERS):
        with pytest.raises(ValueError, match=re.escape(message)):
            cut_by_counts(parts, counts)


def test_fewer_layers_than_stages_are_refused_whatever_else_there_is() -> None:
    with pytest.raises(ValueError, match="got 6 layers for 7 stages; use 7 or more layers, or fewer stages"):
        cut_evenly(DECODER, 7)


def test_a_cut_without_stages_and_a_stage_that_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="cut into at least 1 stage: got 0"):
        Cut(())
    with pytest.raises(ValueError, match="numbered from 0 to 1: got stage 2 of 2"):
        Cut((1, 1)).parts_of_stage(2)


MODEL = GPT(GPTConfig(num_layers=6))
PROFILE = Profile((), 1, "float32", "cpu")
ODD_NUMBERS = [2.0, True, "2", None, 2j, (2,), torch.tensor(2)]


@pytest.mark.parametrize("number", ODD_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    "cut",
    [
        lambda number: cut_evenly(DECODER, number),
        lambda number: cut_by_counts(DECODER, (number, 4)),
        lambda number: cut_by_layout(DECODER, "Ettt|tttL", number),
        lambda number: cut_by_costs(DECODER, [1.0] * 8, number),
        lambda number: cut_by_parameters(MODEL, number),
        lambda number: min_max_sizes([1.0] * 8, number),
        lambda number: layers_of_stage(6, number, 0),
        lambda number: layers_of_stage(6, 3, number),
        lambda number: layers_of_stage(number, 1, 0),
        lambda number: Cut((number, 6)),
        lambda number: Cut((2, 6)).parts_of_stage(number),
        lambda number: build_stage(MODEL, Cut((4, 4)), number),
    ],
)
def test_what_is_no_whole_number_is_refused_by_all_that_cut(cut: Callable[[Any], object], number: object) -> None:
    """Floats and True came through, and made a cut whose stages nobody could build."""
    if number is None and "cut_by_layout" in cut.__code__.co_names:
        return  # the layout says how many
    with pytest.raises(TypeError, match=r"must be a whole number: got .*; pass one such as 4$"):
        cut(number)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (
            lambda: cut_by_counts(DECODER, "33"),
            "counts are one number of layers a stage, such as (2, 3): got '33'; pass",
        ),
        (lambda: cut_by_counts(DECODER, 6), "counts are one number of layers a stage, such as (2, 3): got 6"),
        (lambda: cut_by_counts(DECODER, {3: 3}), "such as (2, 3): got dict {3: 3}; pass a list or tuple"),
        (
            lambda: cut_by_layout(DECODER, ["Ettt", "tttL"]),
            "a layout is a text such as Et|tt|tL: got list ['Ettt', 'ttt",
        ),
        (lambda: cut_by_layout(DECODER, b"Ettt|tttL"), "a layout is a text such as Et|tt|tL: got bytes b'Ettt|tttL'"),
        (lambda: cut_by_layout(DECODER, None), "a layout is a text such as Et|tt|tL: got None; write it so"),
        (lambda: cut_by_costs(DECODER, 8, 2), "costs are one number a part, such as (1.0, 2.5): got 8"),
        (lambda: cut_by_costs(DECODER, ["1"] * 8, 2), "number 0 must be a number: got '1'; pass one such as 1.5"),
        (lambda: cut_by_costs(DECODER, [True] * 8, 2), "number 0 must be a number: got True"),
        (lambda: min_max_sizes([1j], 1), "number 0 must be a number: got complex 1j"),
        (
            lambda: cut_by_profile(DECODER, {}, 2),
            "a profile is what measure_profile and Profile.from_json return: got d",
        ),
        (
            lambda: cut_by_parameters(DECODER, 2),
            "a model that can be cut has parts, build and num_parameters: got tuple ",
        ),
        (
            lambda: build_stage(MODEL, (4, 4), 0),
            "a cut is what cut_evenly and its like return: got tuple (4, 4); pass ",
        ),
        (lambda: layout_of(DECODER, "Ettt"), "a cut is what cut_evenly and its like return: got 'Ettt'"),
        (lambda: build_stage(DECODER, Cut((8,)), 0), "a model that can be cut has parts, build and num_parameters"),
        (lambda: build_stage(MODEL, Cut((8,)), 0, dtype="half"), "a dtype is one of torch's: got 'half'; use torch.fl"),
        (lambda: Cut(8), "a cut has one number of parts a stage, such as (2, 3): got 8"),
        *(
            (partial(cut, parts), "a model is cut between its parts, such as model.parts: got ")
            for parts in (MODEL, "Etttttt", [1, 2], None)
            for cut in (
                lambda parts: cut_evenly(parts, 1),
                lambda parts: cut_by_counts(parts, [1]),
                lambda parts: cut_by_layout(parts, "t"),
                lambda parts: cut_by_costs(parts, [1.0], 1),
                lambda parts: cut_by_profile(parts, PROFILE, 1),
                lambda parts: layout_of(parts, Cut((1,))),
            )
        ),
    ],
)
def test_what_is_of_another_kind_is_refused_by_all_that_cut(cut: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        cut()


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda: cut_by_costs((), (), 1), "a model has at least 1 part: got none"),
        (lambda: cut_by_layout((), ""), "a model has at least 1 part: got none"),
        (lambda: cut_by_profile(DECODER, PROFILE, 1), "got one of no parts; profile this model"),
        (lambda: cut_by_costs(DECODER, [10**400] * 8, 2), "a cost is a finite number of 0 or more: got 1000000"),
        (lambda: layout_of(DECODER, Cut((2, 2))), "got one of 4 parts for a model of 8; make it from this model's"),
        (
            lambda: cut_by_layout(DECODER, "E|t|t|t|t|t|t|L"),
            "got 6 layers for 8 stages; use 8 or more layers, or fewer",
        ),
        (lambda: build_stage(MODEL, Cut((1,) * 8), 0), "got 6 layers for 8 stages; use 8 or more layers, or fewer"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_all_that_cut(cut: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        cut()


def test_whole_numbers_of_other_types_are_as_good() -> None:
    """As they come out of numpy."""
    numpy = pytest.importorskip("numpy")
    counts = numpy.array([1, 3, 2])
    assert cut_by_counts(DECODER, counts) == Cut((2, 3, 3))
    assert all(type(size) is int for size in cut_by_counts(DECODER, counts).sizes)
    assert cut_evenly(DECODER, numpy.int64(2)) == Cut((4, 4))
    assert cut_by_costs(DECODER, numpy.ones(8, numpy.float32), 2) == Cut((4, 4))
