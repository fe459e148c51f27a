"""What ``verify`` takes, and what it adds to an imported program before it looks."""

from pathlib import Path

import pytest
from programs import BOTH_WAYS, BOTH_WAYS_PLACEMENT, ONE_BY_ONE, TWO_RANKS, V_SHAPED, per_update, program_of

from stagewright.schedules import Program, ScheduleError, create, names, simulate, verify
from stagewright.schedules.placement import looped, waves
from stagewright.schedules.proof import SEMANTICS, Semantics
from stagewright.schedules.proof.completion import complete
from stagewright.schedules.updates import append_updates

DATA = Path(__file__).parents[2] / "data"


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_the_programs_that_the_tests_here_break_are_legal(semantics: Semantics) -> None:
    verify(program_of(TWO_RANKS), semantics)
    verify(program_of(V_SHAPED), semantics)
    verify(program_of(BOTH_WAYS, placement=BOTH_WAYS_PLACEMENT), semantics)
    verify(program_of(ONE_BY_ONE, num_microbatches=1, rule=per_update(1, [1])), semantics)


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("name", names())
def test_every_schedule_is_legal_under_every_semantics(name: str, semantics: Semantics) -> None:
    for num_ranks, num_microbatches in ((1, 1), (1, 3), (2, 2), (2, 5), (3, 6), (4, 4), (4, 8), (4, 16), (6, 12)):
        try:
            schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        except ScheduleError:
            continue  # a shape that the schedule does not serve
        for steps in (1, 3):
            verify(schedule.program(steps), semantics)


def test_unknown_semantics_are_refused_with_those_there_are() -> None:
    with pytest.raises(ScheduleError, match="buffered, rendezvous, in_order: got semantics='eager'"):
        verify(program_of(TWO_RANKS), "eager")  # type: ignore[arg-type]


TORCH = {
    "interleaved": (looped(4, 2), 57.0),
    "bfs": (looped(4, 2), 57.0),
    "izb": (looped(4, 2), 51.0),
    "zbv": (waves(4), 51.0),
    "dualpipev": (waves(4), 54.0),
}


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("kind", ["compute", "comms"])
@pytest.mark.parametrize("name", TORCH)
def test_files_that_torch_wrote_are_legal(name: str, kind: str, semantics: Semantics) -> None:
    """Written by ``_dump_csv`` of torch 2.13's schedules at P=4, M=8, formats compute_only and compute_comms."""
    program = Program.from_csv((DATA / "torch" / f"{name}_{kind}.csv").read_text())
    placement, makespan = TORCH[name]
    assert (program.num_ranks, program.num_stages, program.num_microbatches) == (4, 8, 8)
    assert program.placement == placement
    verify(program, semantics)
    assert simulate(program).makespan == makespan


def test_the_tokens_of_a_torch_file_are_read_as_they_stand() -> None:
    text = (DATA / "torch" / "dualpipev_comms.csv").read_text()
    program = Program.from_csv(text)
    assert program.to_csv() == text
    assert [str(instruction) for instruction in program.streams[0]][:4] == ["0UNSHARD", "7UNSHARD", "0F0", "0SEND_F0"]


@pytest.mark.parametrize("file", sorted((DATA / "streams").glob("*.csv")), ids=lambda file: file.stem)
def test_the_reference_streams_are_legal(file: Path) -> None:
    verify(Program.from_csv(file.read_text()))


def test_an_imported_program_gets_one_update_a_batch_after_the_gradients_of_its_rank() -> None:
    program = program_of("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1", num_microbatches=1)
    assert append_updates(program).to_csv() == ("0F0,0B0,0STEP@1,0F1,0B1,0STEP@2\n1F0,1B0,1STEP@1,1F1,1B1,1STEP@2\n")
    verify(program)


def test_an_imported_program_with_replicas_gets_their_reductions() -> None:
    program = program_of("0F0,1F1,1B1,0B0\n0F1,1F0,1B0,0B1")
    appended = append_updates(program)
    assert [str(instruction) for instruction in appended.streams[1][-4:]] == [
        "0REDUCE_GRAD",
        "1REDUCE_GRAD",
        "0STEP@1",
        "1STEP@1",
    ]
    verify(program)


def test_what_a_program_says_of_its_reductions_is_left_alone() -> None:
    program = program_of("0F0,0B0,0REDUCE_GRAD")
    assert complete(program).to_csv() == "0F0,0B0,0REDUCE_GRAD,0STEP@1\n"


def test_a_complete_program_is_not_touched() -> None:
    program = program_of(TWO_RANKS)
    assert complete(program) is program
