"""Copies of a stage that are not alike are refused on every rank, before anything of them is added up."""

from collections.abc import Mapping
from typing import Any

import pytest
from launching import Kind, launch_on
from unlike import try_to_train

REMEDY = "; build the same module for every copy, and freeze the same parameters in each"
REPLICAS = {"replicas": (2, 1)}


def said(
    kinds: Mapping[int, str],
    num_ranks: int,
    schedule: str = "1f1b",
    dp: int = 1,
    options: Mapping[str, Any] | None = None,
    kind: Kind = "threads",
) -> str:
    """What all ranks say alike; rank r of what is launched builds ``kinds[r]``."""
    (text,) = set(launch_on(kind, try_to_train, num_ranks, (kinds, schedule, dp, options or {})))
    prefix = "ValueError: copies of a stage are alike: "
    if not text:
        return ""
    assert text.startswith(prefix), text
    assert text.endswith(REMEDY)
    return str(text.removeprefix(prefix).removesuffix(REMEDY))


@pytest.mark.parametrize(
    ("kind", "difference"),
    [
        ("frozen", "1.bias of stage 0 is trained float64[6] on rank 0, frozen float64[6] on rank 1"),
        ("wide", "0.weight of stage 0 is trained float64[6, 6] on rank 0, trained float64[8, 6] on rank 1"),
        ("single", "0.weight of stage 0 is trained float64[6, 6] on rank 0, trained float32[6, 6] on rank 1"),
        (
            "three",
            "parameter or buffer 4 of stage 0 is nothing on rank 0, 2.weight trained float64[6, 6] on rank 1",
        ),
        (
            "named",
            "parameter or buffer 0 of stage 0 is 0.weight trained float64[6, 6] on rank 0, "
            "first.weight trained float64[6, 6] on rank 1",
        ),
        ("counting", "parameter or buffer 4 of stage 0 is nothing on rank 0, count buffer float64[] on rank 1"),
    ],
)
def test_the_first_difference_is_named_with_who_has_what(kind: str, difference: str) -> None:
    assert said({1: kind}, 3, options=REPLICAS) == difference


def test_all_kinds_of_copies_are_compared() -> None:
    """Those of replicas of the pipeline, of bidirectional schedules, and of replicas of a stage without a flush."""
    assert said({3: "frozen"}, 4, dp=2) == (
        "1.bias of stage 1 is trained float64[6] on rank 1 of replica 0, frozen float64[6] on rank 1 of replica 1"
    )
    frozen = "is trained float64[6] on rank 0, frozen float64[6] on rank 1"
    assert said({1: "frozen"}, 2, "dualpipe") == f"1.bias of stage 0 {frozen}"
    assert said({1: "frozen"}, 3, "2bw", options=REPLICAS) == f"1.bias of stage 0 {frozen}"
    several = said({1: "wide", 2: "frozen", 5: "wide"}, 6, dp=2, options=REPLICAS)
    assert several == (
        "0.weight of stage 0 is trained float64[6, 6] on rank 0 of replica 0, rank 1 of replica 0 and rank 1 of "
        "replica 1, trained float64[8, 6] on rank 0 of replica 1"
    )


@pytest.mark.parametrize(("num_ranks", "dp", "options"), [(4, 2, {}), (3, 1, REPLICAS)])
def test_processes_do_not_abort(num_ranks: int, dp: int, options: dict[str, Any]) -> None:
    """gloo ended the process at the first sum of unequal lengths."""
    for kind in ("frozen", "wide"):
        assert " on rank " in said({1: kind}, num_ranks, dp=dp, options=options, kind="gloo")


def test_copies_that_are_alike_train_whatever_stages_differ_in() -> None:
    assert said({}, 3, options=REPLICAS) == ""
    assert said({0: "frozen", 1: "frozen", 2: "wide"}, 4, dp=2) != ""
    assert said({0: "frozen", 1: "frozen", 2: "counting", 3: "counting"}, 4, dp=2) == ""
    assert said({0: "frozen", 1: "frozen", 2: "three"}, 3, options=REPLICAS) == ""
    assert said({0: "wide", 1: "frozen"}, 2) == "", "a pipeline of single copies compares nothing"


def test_a_rank_that_refuses_its_stages_is_named_to_the_others() -> None:
    options = {**REPLICAS, "tied": [["0.weight", "0.bias"]]}
    texts = launch_on("threads", try_to_train, 3, ({1: "three"}, "1f1b", 1, options))
    assert all(text.startswith("ValueError: tied weights have one shape and type") for text in texts)
    options = {**REPLICAS, "tied": [["0.weight", "2.weight"], ["1.weight", "2.bias"]]}
    first, second, third = launch_on("threads", try_to_train, 3, ({1: "three"}, "1f1b", 1, options))
    assert second.startswith("ValueError: tied weights have one shape and type")
    assert first == third == f"PeerError: rank 1 has refused its stages: {second}"
