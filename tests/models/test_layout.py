"""Cuts in Megatron's notation."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.models import Cut, Part, cut_by_layout, layout_of
from stagewright.models.cut import parts_of_transformer
from stagewright.models.layout import expand

DECODER = parts_of_transformer(6)


@pytest.mark.parametrize(
    ("layout", "expanded"),
    [
        ("Et*3|(tt|)*29,m|L", "Ettt|" + "tt|" * 29 + "m|L"),
        ("E,t,t|t,L", "Ett|tL"),
        ("E(t)*2|tL", "Ett|tL"),
        ("E((t|)*2t|)*2L", "Et|t|t|t|t|t|L"),
        ("Et*12L", "E" + "t" * 12 + "L"),
        ("t*2*3", "tttttt"),
        ("t|*3", "t|||"),
        ("E t | t L", "Et|tL"),
        ("", ""),
    ],
)
def test_repetitions_are_written_out(layout: str, expanded: str) -> None:
    assert expand(layout) == expanded


def test_megatrons_own_example_has_32_stages() -> None:
    cut = cut_by_layout(parts_of_transformer(3 + 58), "Et*3|(tt|)*29,L", 31)
    assert cut == Cut((4, *[2] * 29, 1))


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [("Ett|ttt|tL", (3, 3, 2)), ("E|t*6|L", (1, 6, 1)), ("Et*6L", (8,)), ("Et|(tt|)*2tL", (2, 2, 2, 2))],
)
def test_a_stage_is_what_stands_between_bars(layout: str, sizes: tuple[int, ...]) -> None:
    assert cut_by_layout(DECODER, layout) == Cut(sizes)


def test_a_model_without_ends_has_layers_only() -> None:
    assert cut_by_layout(tuple(map(Part, "0123")), "t|tt|t") == Cut((1, 2, 1))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Et*3|ttm|tL", "m is a multi-token-prediction layer, and this model has none: got 'Et*3|ttm|tL'; leave the m"),
        ("Ettt||tttL", "stage 1 of 3 is empty in 'Ettt||tttL'; leave out a |, or put a t there"),
        ("Ettt|ttt|L|", "stage 3 of 4 is empty"),
        ("Ettt|ttL", "here Et*6L with 6 t: got Et*5L with 5 t; change 'Ettt|ttL' accordingly"),
        ("ttt|tttL", "here Et*6L with 6 t: got t*6L with 6 t"),
        ("Ettt|tttLL", "got Et*6LL with 6 t"),
        ("tE|ttt|ttL", "got tEt*5L with 6 t"),
        ("Ettt|tttL(", "a group in a layout ends with ): 1 not closed"),
        ("Ettt|tttL)", "is wrong in column 10: ')' closes what was never opened; leave it out"),
        ("*3Ettt", "is wrong in column 1: '*3Ettt' repeats nothing; put a letter or a group before it"),
        ("Et*0|tL", "column 3: '*0|tL' repeats at least once"),
        ("Et*99999999999999999999|L", "repeats at least once, and makes at most 100000 letters; use another number"),
        ("E((t*1000)*1000)*1000L", "column 11: '*1000)*1' repeats at least once, and makes at most 100000 letters"),
        ("Et|xL", "is wrong in column 4: 'xL' unknown here; use E t m L | ( ) *n and commas"),
        ("Et*|L", "is wrong in column 3: '*|L' unknown here"),
        ("Et*٣|L", "is wrong in column 3"),
        ("", "stage 0 of 1 is empty"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_the_place(layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        cut_by_layout(DECODER, layout)


def test_another_number_of_stages_than_wanted_is_refused() -> None:
    message = "what each of 4 stages holds: got 2 in 'Ettt|tttL'; use 3 |"
    with pytest.raises(ValueError, match=re.escape(message)):
        cut_by_layout(DECODER, "Ettt|tttL", 4)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_every_cut_can_be_written_and_read(sizes: list[int]) -> None:
    parts = tuple(Part(str(index)) for index in range(sum(sizes)))
    cut = Cut(tuple(sizes))
    assert cut_by_layout(parts, layout_of(parts, cut), len(sizes)) == cut


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [((2, 1, 1, 1, 1, 2), "Et|(t|)*4tL"), ((4, 4), "Ettt|tttL"), ((1, 5, 2), "E|t*5|tL")],
)
def test_a_cut_is_written_briefly(sizes: tuple[int, ...], layout: str) -> None:
    assert layout_of(DECODER, Cut(sizes)) == layout


@given(st.text(alphabet="EtmL|()*,0123456789 x", max_size=40))
def test_whatever_is_written_gives_a_cut_of_all_parts_or_a_value_error(layout: str) -> None:
    try:
        cut = cut_by_layout(DECODER, layout)
    except ValueError:
        return
    assert cut.num_parts == 8
