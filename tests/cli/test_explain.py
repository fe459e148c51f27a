"""`stagewright explain`, and the file that `stagewright train --trace` writes for it."""

import json
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from stagewright.cli.corpus import Corpus, load_corpus
from stagewright.cli.explain import show_explanation
from stagewright.cli.explain_command import FORMATS
from stagewright.cli.main import main
from stagewright.cli.metrics import Silence, TrainResult
from stagewright.cli.output import format_of
from stagewright.cli.settings import TrainSettings
from stagewright.cli.trace_file import TraceFile
from stagewright.cli.trainer import train
from stagewright.engine import RankContext, launch_local
from stagewright.schedules import Costs, Program, ScheduleError, Timeline, create, parse
from stagewright.schedules.explanation import explain
from stagewright.schedules.placement import linear
from stagewright.schedules.recording import Recording

TWO_RANKS = Program.from_csv(
    "0F0,0SEND_F0,0RECV_B0,0B0,0STEP@1\n1RECV_F0,1F0,1B0,1SEND_B0,1STEP@1",
    placement=linear(2),
)
# F takes 10 and 30 ms, B 20 and 60; rank 1 stands still for 5 ms before its B.
RANK_0 = [(0, 10), (10, 10), (10, 10), (105, 125), (125, 125)]
RANK_1 = [(0, 0), (10, 40), (45, 105), (105, 105), (105, 105)]


def step(share: float = 1.0) -> Timeline:
    times = [(share * start / 1e3, share * end / 1e3) for start, end in RANK_0 + RANK_1]
    return Timeline(TWO_RANKS, Costs(), tuple(start for start, _ in times), tuple(end for _, end in times))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three steps, of which the second is the longest and the third of median length."""
    path = tmp_path / "step.json"
    costs = Costs(forward=(0.01, 0.03), backward=(0.02, 0.06))
    path.write_text(Recording("1f1b", costs, (step(0.5), step(2.0), step())).to_json())
    return path


def test_where_the_time_of_each_rank_went(capsys: pytest.CaptureFixture[str]) -> None:
    explanation = explain(step(), Costs(forward=(0.01, 0.03), backward=(0.02, 0.06)))
    show_explanation(Console(width=100), explanation, "1f1b", 3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "1f1b",
        "2 ranks, 2 stages, 1 microbatch",
        "the step took 125.0 ms; predicted 120.0 ms (+4.2%)",
    ]
    rows = [line.split() for line in lines if line.strip() and line.split()[0] in ("0", "1")]
    assert rows == [
        ["0", "125.0", "30.0", "24%", "60.0", "48%", "30.0", "24%", "0.000", "0%", "5.00", "4%"],
        ["1", "125.0", "90.0", "72%", "60.0", "48%", "-30.0", "-24%", "0.000", "0%", "5.00", "4%"],
    ]
    assert next(line.split() for line in lines if line.strip().startswith("1B0")) == [
        "1B0", "1", "45.0", "60.0", "25.0", "20.0", "5.00"
    ]  # fmt: skip


def test_the_step_of_median_length_is_explained(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(file)]) == 0
    assert "the step took 125.0 ms; predicted 120.0 ms" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "milliseconds"), [("1", "62.5"), ("2", "250.0"), ("-1", "125.0")])
def test_any_step_can_be(file: Path, number: str, milliseconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(file), "--step", number]) == 0
    assert f"the step took {milliseconds} ms" in capsys.readouterr().out


def test_as_many_instructions_are_named_as_are_asked_for(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(file), "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert [token for token in ("0F0", "0B0", "1F0", "1B0") if f"{token} " in out] == ["1F0", "1B0"]


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("o.svg", ">measured<"), ("o.html", '"name":"measured"'), ("o.json", '"makespan": 125.0'),
        ("o.trace.json", '"traceEvents"'), ("o.txt", "the step took 125.0 ms"),
    ],
)  # fmt: skip
def test_the_end_of_the_name_says_the_format(file: Path, tmp_path: Path, name: str, sign: str) -> None:
    assert main(["explain", str(file), "-o", str(tmp_path / name)]) == 0
    assert sign in (tmp_path / name).read_text(encoding="utf-8")


def test_a_format_without_a_file_is_printed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(file), "--format", "svg"]) == 0
    assert capsys.readouterr().out.startswith("<svg")


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "Expecting property name"), ("[]", "this is no recording"), ("\x00", "Expecting value")],
)
def test_what_is_no_recording_is_refused_in_one_line(
    tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert main(["explain", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"stagewright explain: {path}: ")
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("number", ["0", "4", "-4"])
def test_a_step_that_is_not_there_is_refused(file: Path, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(file), "--step", number]) == 2
    assert "3 are recorded; use 1 to 3, or -1 for the last" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err


SHAPE = {"steps": 4, "layers": 2, "hidden": 16, "heads": 2, "sequence": 16, "batch_size": 4}
TRAIN = ["train", "--quiet", *(f"--{name.replace('_', '-')}={value}" for name, value in SHAPE.items())]


def test_a_run_gives_its_last_steps_to_the_trace(tmp_path: Path) -> None:
    """All but the very first; what is written is read and explained."""
    path = tmp_path / "step.json"
    schedule = create("1f1b", num_ranks=2, num_microbatches=2)
    settings = TrainSettings(schedule, trace=path, quiet=True, **SHAPE)  # type: ignore[arg-type]
    corpus = load_corpus(None)
    results = launch_local(partial(train_rank, settings, corpus), 2, backend="threads")
    TraceFile(path).run_done(results[settings.reporter])
    recording = Recording.from_json(path.read_text())
    assert recording.schedule == "1f1b"
    assert [step.program for step in recording.steps] == [recording.program] * 3
    assert recording.program.streams[0][0] == parse("0F0")
    assert len(explain(recording.typical, recording.costs).splits) == 2


def train_rank(settings: TrainSettings, corpus: Corpus, context: RankContext) -> TrainResult | None:
    return train(context, settings, corpus, Silence())


@pytest.mark.slow
def test_train_records_what_explain_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json"
    assert main([*TRAIN, "--microbatches", "2", "--trace", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["schedule"] == "1f1b"
    assert len(document["steps"]) == 3
    assert len(document["costs"]["forward"]) == 2
    capsys.readouterr()
    assert main(["explain", str(path)]) == 0
    assert "2 ranks, 2 stages, 2 microbatches" in capsys.readouterr().out


def test_a_trace_that_cannot_be_written_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TRAIN, "--trace", str(tmp_path / "none" / "step.json")]) == 2
    assert "cannot write the trace to" in capsys.readouterr().err


def test_a_name_that_says_no_format_is_refused(tmp_path: Path) -> None:
    """As by show: both take the format from one place."""
    with pytest.raises(
        ScheduleError, match=r"\.png is none of \.trace\.json \.txt \.svg \.html \.json \.trace; take one"
    ):
        format_of(tmp_path / "step.png", FORMATS)
    assert [
        format_of(name and tmp_path / name, FORMATS) for name in (None, "a", "a.svg", "a.trace.json", "a.json")
    ] == [*("text", "text", "svg", "trace", "json")]
