"""`stagewright verify`: exit codes, the summary, and that nothing ends in a traceback."""

import argparse
import io
import random
import shlex
import sys
from pathlib import Path

import pytest

from stagewright.cli import verify_command
from stagewright.cli.main import main
from stagewright.schedules import create, find, names

DATA = Path(__file__).parents[1] / "data"


def verify(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    verify_command.add_parser(parser.add_subparsers())
    return verify_command.run(parser.parse_args(["verify", *flags]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "program.csv"
    path.write_text(create("1f1b", num_ranks=4, num_microbatches=8).program().to_csv())
    return path


def test_a_legal_program_is_summed_up_in_one_paragraph(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(str(file)) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert " ".join(printed.out.split()) == (
        f"{file} is legal under rendezvous sends: 4 ranks, 4 stages, 8 microbatches, 164 instructions. With F = I = W "
        "= 1 and B = 2 its makespan is 33, where 24 is ideal: a bubble fraction of 0.2727 (idle / (P x makespan)), a "
        "bubble overhead of 0.3750 ((makespan - ideal) / ideal). A rank stashes at most 4 microbatches of one stage."
    )


@pytest.mark.parametrize("semantics", ["buffered", "rendezvous", "in_order", "in-order"])
@pytest.mark.parametrize("kind", ["compute", "comms"])
def test_torchs_files(kind: str, semantics: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = DATA / "torch" / f"zbv_{kind}.csv"
    flags = ("--semantics", semantics, "--placement", "v", "--chunks", "2", "--microbatches", "8")
    assert verify(str(path), *flags) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "4 ranks, 8 stages, 8 microbatches," in printed
    assert "of them sends, receives and updates that the file leaves out)" in printed


def test_an_illegal_program_is_refused_with_the_reason(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(file.read_text().replace("2SEND_F5,", ""))
    assert verify(str(file)) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"{file}: receive without send: nobody sends what rank 3: 3RECV_F5")
    assert "[3RECV_F5]" in printed.err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0,0B0\n1F0,2FOO\n", "token: rank 1, column 1: '2FOO' is no instruction"),
        ("\n\n,,\n", "missing compute: a program computes something"),
        (
            "0F999999999\n",
            "missing compute: every microbatch runs on every stage: 1 stages and 1000000000 microbatches",
        ),
        ("999999999F0\n", "missing compute: every microbatch runs on every stage: 1000000000 stages"),
        ("0F0,0B0,0SEND_F999999999\n", "unknown stage or microbatch: rank 0: 0SEND_F999999999"),
        ("0F0,0B0,0STEP@999999999\n", "step order: rank 0: 0STEP@999999999"),
        ("0F0@999999999,0B0\n", "version not made: rank 0: 0F0@999999999"),
    ],
)
def test_what_is_no_program(text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "program.csv"
    path.write_text(text)
    assert verify(str(path)) == 1
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--chunks", "2"), "a rank owns 1 stage(s) here, not --chunks 2"),
        (("--placement", "v"), "placement: v on 4 ranks has 8 stages, but here are 4"),
        (("--placement", "bidirectional"), "placement: rank 0: 0F4"),
        (("--microbatches", "3"), "8 microbatches are no whole number of batches of 3"),
        (("--microbatches", "4"), "leftover: the gradients of microbatches 4..7 on stage 0 are never applied"),
        (("--update-every", "3"), "leftover: the gradients of microbatches 3..5 on stage 0 are never applied"),
        (("--chunks", "999999999", "--placement", "loop"), "not --chunks 999999999"),
    ],
)
def test_a_program_that_is_not_what_the_flags_say(
    flags: tuple[str, ...], reason: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(str(file), *flags) == 1
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "shape", "flags"),
    [
        ("gpipe", {}, ("--placement", "linear", "--chunks", "1")),
        ("interleaved", {"num_chunks": 2}, ("--placement", "loop", "--chunks", "2")),
        ("2bw", {}, ("--microbatches", "8", "--versions", "2", "--staleness", "1")),
        ("pipedream", {}, ("--microbatches", "8", "--update-every", "1", "--versions", "4", "--staleness", "3")),
    ],
)
def test_our_own_files_with_the_flags_that_they_need(
    name: str, shape: dict[str, int], flags: tuple[str, ...], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = create(name, num_ranks=4, num_microbatches=8, **shape)
    file.write_text(schedule.program(2 if "--microbatches" in flags else 1).to_csv())
    assert verify(str(file), *flags) == 0, capsys.readouterr().err


SHOWN = [
    *(f"{name} --ranks 4 --microbatches 8" for name in names()),
    "1f1b --ranks 3 --microbatches 7 --schedule-option replicas=2,1",
    "1f1b --ranks 4 --microbatches 8 --steps 2",
    *(
        f"{name} --ranks {sum(replicas)} --microbatches {num_microbatches} --steps {steps} "
        f"--schedule-option replicas={','.join(map(str, replicas))}"
        for name, num_microbatches in (("2bw", 7), ("2bw", 12), ("pipedream", 6), ("pipedream", 12))
        for replicas in ((2, 1), (1, 2), (3, 2), (1, 2, 1))
        for steps in (1, 3)
    ),
    "pipedream --ranks 3 --microbatches 4 --schedule-option replicas=2,1 --schedule-option vertical_sync=yes",
]


@pytest.mark.parametrize("flags", SHOWN)
def test_what_show_writes_is_proved_by_the_command_that_it_names(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And by nothing but the file where it names none."""
    file = tmp_path / "a program.csv"
    assert main(["show", *flags.split(), "-o", str(file)]) == 0
    told = capsys.readouterr().err
    command = told.removeprefix("to prove it: stagewright ") or f"verify {shlex.quote(str(file))}"
    assert main(shlex.split(command)) == 0, capsys.readouterr().err
    is_usual = find(flags.split()[0]).synchronous and "--steps" not in flags
    assert (told == "") == is_usual


@pytest.mark.parametrize(
    "missing", ["--microbatches", "--update-every", "--versions", "--staleness", "--gradient-buff"]
)
def test_whoever_leaves_out_a_flag_is_told_of_all(missing: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"--microbatches": "4", "--update-every": "2", "--versions": "3", "--staleness": "2"}
    flags |= {"--gradient-buffers": "2"}
    schedule = create("pipedream", num_ranks=3, num_microbatches=4, replicas=(2, 1))
    file.write_text(schedule.program(3).to_csv())
    given = [text for flag, value in flags.items() if not flag.startswith(missing) for text in (flag, value)]
    if verify(str(file), *given) == 0:
        assert missing == "--microbatches", "an update is no batch here"
        return
    told = capsys.readouterr().err
    assert all(flag in told for flag in flags)
    assert "what `stagewright show SCHEDULE -o FILE.csv` says of a program of ours" in told


def test_standard_input(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert verify("-") == 0
    assert capsys.readouterr().out.startswith("standard input is legal")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe0F0", "is no text in UTF-8: invalid start byte at byte 0"),
        (b"0F0,\x80", "is no text in UTF-8: invalid start byte at byte 4"),
        (b"0F0,0B0\n" * 5000, "has 5000 lines: too many for a program, at most 4096 ranks"),
    ],
)
def test_what_cannot_be_read(content: bytes, reason: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(content)
    assert verify(str(file)) == 2
    assert reason in capsys.readouterr().err


def test_no_such_file_or_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(str(tmp_path / "missing.csv")) == 2
    assert "No such file or directory" in capsys.readouterr().err
    assert verify(str(tmp_path)) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_a_file_without_end_is_not_read_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("/dev/zero") == 2
    assert "too large for a program" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ("--semantics", "eager"),
        ("--placement", "zigzag"),
        ("--chunks", "0"),
        ("--chunks", "-1"),
        ("--microbatches", "1e3"),
        ("--versions", "99999999999999999999"),
        ("--staleness", "-1"),
        (),
    ],
)
def test_a_bad_command_line(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        verify(*((*flags, "program.csv") if flags else ()))
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_garbled_files_never_end_in_a_traceback(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pick = random.Random(0)
    whole = file.read_text()
    codes = set()
    for _ in range(150):
        text = list(whole)
        for _ in range(pick.choice((1, 1, 2, 5))):
            place = pick.randrange(len(text))
            text[place] = pick.choice(["", ",", "\n", "0", "9", "F", "B", "@1", ";", "(", "\x00", "\u2028", "é"])
        file.write_text("".join(text), encoding="utf-8")
        codes.add(verify(str(file)))
        capsys.readouterr()
    assert codes == {0, 1}


def test_where_there_is_nothing_to_prove_the_exit_code_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "program.csv"
    path.write_text("\n \n")
    assert verify(str(path)) == 2
    assert capsys.readouterr().err == f"stagewright verify: {path} is empty: there is nothing to prove\n"
