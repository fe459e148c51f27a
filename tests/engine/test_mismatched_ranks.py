"""Ranks that do not agree, or that end one before the other: a clear end on all of them, and nobody waits."""

from collections.abc import Mapping
from typing import Any, Final

import pytest
import torch
from launching import Kind, launch_on
from mismatched import COMMON, begin_twice, train_on_few_rows, train_to_the_end_of_the_data, try_to_begin
from plain import make_batch

from stagewright.engine import ErrorFeedback, Pipeline, launch_local, roll_call
from stagewright.engine.roll_call import differences
from stagewright.schedules import Program, create


def refused(of_ranks: Mapping[int, Mapping[str, Any]], num_ranks: int = 3, kind: Kind = "threads", dp: int = 1) -> str:
    """What all ranks say alike."""
    said = launch_on(kind, try_to_begin, num_ranks, (of_ranks, dp))
    assert len(set(said)) == 1, said
    return str(said[0]).removesuffix("; every rank makes its Pipeline with the same arguments, by the same code")


def test_ranks_that_agree_train() -> None:
    assert refused({}) == ""


@pytest.mark.parametrize(
    ("of_rank", "message"),
    [
        ({"num_microbatches": 8}, "num_microbatches: 4 on ranks 0 and 1, 8 on rank 2"),
        ({"schedule": "gpipe"}, "schedule: 1f1b on ranks 0 and 1, gpipe on rank 2"),
        ({"schedule": "2bw"}, "schedule: 1f1b on ranks 0 and 1, 2bw on rank 2"),
        (
            {"schedule": "interleaved", "num_chunks": 2, "num_microbatches": 3},
            "schedule: 1f1b on ranks 0 and 1, interleaved (num_chunks=2) on rank 2; "
            "num_microbatches: 4 on ranks 0 and 1, 3 on rank 2; num_stages: 3 on ranks 0 and 1, 6 on rank 2",
        ),
        ({"seed": 7}, "seed: 0 on ranks 0 and 1, 7 on rank 2"),
        ({"share_loss": True}, "share_loss: False on ranks 0 and 1, True on rank 2"),
        ({"max_norm": 1.0}, "max_norm: None on ranks 0 and 1, 1.0 on rank 2"),
        ({"loss_scale": "dynamic"}, "loss_scale: None on ranks 0 and 1, dynamic on rank 2"),
        ({"autocast": torch.bfloat16}, "autocast: None on ranks 0 and 1, torch.bfloat16 on rank 2"),
        ({"dynamic_shapes": True}, "dynamic_shapes: False on ranks 0 and 1, True on rank 2"),
        ({"on_nan": "skip"}, "on_nan: None on ranks 0 and 1, skip on rank 2"),
        ({"tied": [["a", "b"]]}, "tied: [] on ranks 0 and 1, [[a, b]] on rank 2"),
        ({"staleness": ErrorFeedback()}, "staleness: [] on ranks 0 and 1, ErrorFeedback(strength=1.0) on rank 2"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_argument_of_one_rank_is_refused_on_all_with_the_difference(
    of_rank: Mapping[str, Any], message: str
) -> None:
    assert refused({2: of_rank}) == f"ValueError: ranks differ in {message}"


def test_every_rank_may_be_another() -> None:
    of_ranks = {rank: {"seed": rank % 3} for rank in range(4)}
    assert refused(of_ranks, 4) == "ValueError: ranks differ in seed: 0 on ranks 0 and 3, 1 on rank 1, 2 on rank 2"


def test_processes_find_it_too() -> None:
    message = "ValueError: ranks differ in num_microbatches: 8 on ranks 0, 1 and 3, 4 on rank 2"
    of_ranks = {rank: {"num_microbatches": 8} for rank in (0, 1, 3)}
    assert refused(of_ranks, 4, kind="gloo") == message


def test_replicas_must_agree_too() -> None:
    """Rank 3 of the mesh is rank 1 of replica 1."""
    assert refused({3: {"seed": 1}}, 4, dp=2) == (
        "ValueError: ranks differ in seed: 0 on rank 0 of replica 0, rank 1 of replica 0 and rank 0 of replica 1, "
        "1 on rank 1 of replica 1"
    )


def test_one_schedule_may_have_two_names() -> None:
    schedule = create("1f1b", num_ranks=3, num_microbatches=4)
    of_ranks = {0: {"schedule": "pipedream-flush"}, 1: {"schedule": schedule}, 2: {"schedule": schedule.program()}}
    assert refused(of_ranks) == ""


def test_what_a_rank_may_decide_for_itself() -> None:
    assert refused({1: {"recompute": "full", "optimizer": torch.optim.AdamW}}) == ""


def test_programs_that_differ_in_one_instruction_are_told_apart_by_it() -> None:
    """The same shape, placement and updates, from elsewhere: rank 1 runs its microbatches in another order."""
    own = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2B0,2F1,2B1\n"
    other = own.replace("1F0,1B0,1F1", "1F0,1F1,1B0")
    programs = [Program.from_csv(text, placement="linear") for text in (own, own, other)]
    of_ranks = {rank: {"schedule": program, "num_microbatches": None} for rank, program in enumerate(programs)}
    said = refused(of_ranks)
    assert said.startswith("ValueError: ranks differ in program: instruction ")
    assert " of rank 1 is " in said
    assert said.endswith(" on rank 2")


def test_another_version_of_the_code_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each rank had read other files: what is read is said, and what is said is compared."""
    sources = iter(["0123", "4567", "0123"])
    monkeypatch.setattr(roll_call, "_source", lambda: next(sources))
    said = refused({})
    assert said.startswith("ValueError: ranks differ in source of stagewright: ")
    assert "4567 on rank" in said
    assert "0123 on ranks" in said


def test_what_follows_from_another_difference_is_left_out() -> None:
    one = {"version of stagewright": "1", "schedule": "a", "num_microbatches": "4", "placement": "x", "program": "p"}
    assert differences({"rank 0": one, "rank 1": {**one, "schedule": "b", "program": "q"}}) == {
        "schedule": "a on rank 0, b on rank 1"
    }
    assert differences({"rank 0": one, "rank 1": {**one, "schedule": "b"}}) == {}
    assert differences({"rank 0": one, "rank 1": {**one, "placement": "y", "program": "q"}}) == {
        "placement": "x on rank 0, y on rank 1"
    }
    newer = {**one, "version of stagewright": "2", "program": "q", "something new": "on"}
    assert differences({"rank 0": one, "rank 1": newer}) == {
        "version of stagewright": "1 on rank 0, 2 on rank 1",
        "something new": "nothing on rank 0, on on rank 1",
    }


@pytest.mark.parametrize(
    ("of_rank", "message"),
    [
        ({"schedule": "1g1b"}, "ScheduleError: there is no schedule '1g1b'"),
        ({"num_microbatches": 0}, "ScheduleError: num_microbatches is a whole number from 1 up: got 0"),
        ({"on_nan": "ignore"}, 'ValueError: on_nan is "raise", "skip" or None: got \'ignore\''),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_rank_that_refuses_its_arguments_is_named_to_the_others(
    kind: Kind, of_rank: Mapping[str, Any], message: str
) -> None:
    first, second, third = launch_on(kind, try_to_begin, 3, ({1: of_rank}, 1))
    assert second.startswith(message)
    assert first == third == f"PeerError: rank 1 has refused its arguments: {second}"


def test_a_refusal_leaves_the_ranks_in_step() -> None:
    """All have the same wrong argument, then one has; what is right runs after that on the same transport."""
    for wrong, different, right in launch_on("threads", begin_twice, 3):
        assert wrong.startswith("ScheduleError: there is no schedule '1g1b'")
        assert different.startswith("ValueError: ranks differ in seed")
        assert right == ""


@pytest.mark.parametrize(
    ("schedule", "short"),
    [(name, rank) for name in ("gpipe", "1f1b", "zb-h1") for rank in range(3)],
)
def test_data_that_ends_on_one_rank_first_ends_all(schedule: str, short: int) -> None:
    said = launch_local(train_to_the_end_of_the_data, 3, backend="threads", args=(schedule, short))
    for rank, text in enumerate(said):
        if rank == short:
            assert text == "2 steps"
        else:
            assert text.startswith(f"data ended on rank {short} after batch 2: rank {short} has returned while another")


@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
@pytest.mark.parametrize("short", range(3))
def test_data_that_ends_on_one_rank_first_ends_all_without_a_flush(short: int, kind: str) -> None:
    """Once rank 0 waited in its drain for gradients, the others for activations of a batch that it never began."""
    backend: Any = {"threads": "threads", "processes": "gloo"}[kind]
    said = launch_local(train_to_the_end_of_the_data, 3, backend=backend, args=("2bw", short))
    for rank, text in enumerate(said):
        ended = f"data ended on rank {short} after batch 2, and rank "
        returned = f"data ended on rank {short} after batch 2: rank {short} has returned while another rank still waits"
        assert text.startswith((ended, returned)) or (rank == short and text == "2 steps")
    assert said.count("2 steps") <= 1


@pytest.mark.slow
def test_data_that_ends_on_one_process_first_ends_all() -> None:
    said = launch_local(train_to_the_end_of_the_data, 3, args=("1f1b", 1))
    assert said[1] == "2 steps"
    assert all("rank 1 has returned while another rank still waits" in text for text in (said[0], said[2]))


FEW_ROWS: Final = "every microbatch has at least one row: {} has 3 rows for 4 microbatches"


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_batch_of_fewer_rows_than_microbatches_ends_all(kind: Kind) -> None:
    """Also where the rank that refuses it goes on with something else."""
    first, second, third = launch_on(kind, train_on_few_rows, 3, ([8, 3],))
    assert first.startswith("1: ValueError: " + FEW_ROWS.format("x"))
    assert third.startswith("1: ValueError: " + FEW_ROWS.format("y"))
    reasons = [f"rank 0 has refused its batch: {first[3:]}", f"rank 2 has refused its batch: {third[3:]}"]
    assert second in [f"1: PeerError: {reason}" for reason in reasons]


def test_as_many_rows_as_microbatches_are_enough() -> None:
    assert launch_on("threads", train_on_few_rows, 3, ([8, 4],)) == ["all"] * 3


def test_one_rank_alone_goes_on_after_a_batch_that_it_has_refused() -> None:
    with Pipeline(**COMMON) as pipe:
        with pytest.raises(ValueError, match="3 rows for 4 microbatches"):
            pipe.train_step(*make_batch(3, 0))
        assert pipe.train_step(*make_batch(4, 0)) is not None
