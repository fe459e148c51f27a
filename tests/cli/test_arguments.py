"""Wrong input gets one clear line and exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.cli.arguments import build_parser
from stagewright.cli.main import main
from stagewright.cli.settings import TrainSettings
from stagewright.cli.train_arguments import train_settings
from stagewright.schedules import create


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "stagewright: the following arguments are required: COMMAND"),
        ("shwo", "invalid choice: 'shwo'"),
        ("show 1f2b", "there is no schedule '1f2b'; did you mean 1f1b"),
        ("show --schedule nothing", "there is no schedule 'nothing'"),
        ("show 1f1b --ranks 0", "num_ranks is a whole number from 1 up: got 0"),
        ("show 1f1b --ranks two", "argument --ranks: invalid int value: 'two'"),
        ("show 1f1b --chunks 3", "got num_chunks=3"),
        ("show 1f1b --costs F=-1", "a cost is a number from 0 up, or one a stage as in F=1:1:2: got 'F=-1'"),
        ("show 1f1b --costs F=1:2", "a sequence of costs has one number a stage: got 2 forward costs for 4 stages"),
        ("show 1f1b --steps 0", "steps is a whole number from 1 up: got 0"),
        ("show 1f1b --format png", "argument --format: invalid choice: 'png'"),
        ("show 1f1b --palette pink", "argument --palette: invalid choice: 'pink'"),
        (
            "show 1f1b -o no/such/folder/picture.svg",
            "cannot write no/such/folder/picture.svg: No such file or directory",
        ),
        ("show 1f1b --micro-batch-size 3", "--micro-batch-size needs --global-batch-size"),
        ("show 1f1b --schedule-module no_such_module", "No module named 'no_such_module'"),
        ("train --schedule 1f2b", "there is no schedule '1f2b'"),
        ("train --steps 0", "argument --steps: a whole number from 1 up is needed: got '0'"),
        ("train --steps ten", "argument --steps: a whole number from 1 up is needed: got 'ten'"),
        ("train --clip 0", "argument --clip: a number above 0 is needed: got '0'"),
        ("train --accumulate 0", "argument --accumulate: a whole number from 1 up is needed: got '0'"),
        ("train --accumulate 3 --schedule 2bw", "got --accumulate 3; use --batch-size 48 --microbatches 12"),
        ("train --schedule 2bw --ranks 4 --microbatches 2", "2bw needs at least P - 1 microbatches"),
        ("train --schedule pipedream --clip 1", "pipedream updates each stage by itself after every microbatch"),
        ("train --schedule pipedream --tie", "pipedream updates each stage by itself after every microbatch"),
        ("train --schedule pipedream --dtype float16", "pipedream updates each stage by itself after every microbatch"),
        ("train --schedule seq1f1b", "the engine cannot run seq1f1b"),
        ("train --dtype float8", "argument --dtype: invalid choice: 'float8'"),
        ("train --optimizer adam", "argument --optimizer: invalid choice: 'adam'"),
        ("train --recompute half", "argument --recompute: off, full or a whole number from 0 up is needed: got 'half'"),
        ("train --recompute -1", "argument --recompute: off, full or a whole number from 0 up is needed: got '-1'"),
        ("train --lr -1", "argument --lr: a number above 0 is needed: got '-1'"),
        ("train --lr fast", "argument --lr: a number above 0 is needed: got 'fast'"),
        ("train --sample= --steps 2", "argument --sample: a text with at least one byte is needed: got ''"),
        ("train --sample-bytes 0", "argument --sample-bytes: a whole number from 1 up is needed: got '0'"),
        ("train --temperature -1", "argument --temperature: a number from 0 up is needed: got '-1'"),
        ("train --temperature warm", "argument --temperature: a number from 0 up is needed: got 'warm'"),
        ("train --no-such-flag", "unrecognized arguments: --no-such-flag"),
        ("train --batch-size 8 --global-batch-size 16", "--batch-size 8 contradicts --global-batch-size 16"),
        ("train --micro-batch-size 5", "got --global-batch-size 16 with --micro-batch-size 5"),
        ("train --batch-size 2 --microbatches 4", "every microbatch needs a sequence"),
        ("train --layers 1 --ranks 2", "every stage needs at least 1 layer"),
        ("train --heads 3", "num_heads must divide hidden_size"),
        ("train --dropout 1.5", "dropout is the probability"),
        ("train --data no/such/path", "no such file or folder: no/such/path"),
        ("train --sequence 100000000", "too short for a sequence of 100000000"),
        ("train --metrics no/such/folder/file.jsonl", "cannot write the metrics to no/such/folder/file.jsonl"),
    ],
)
def test_wrong_input_gets_one_line(command: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(command.split())
    except SystemExit as leaving:  # which is how argparse ends
        code = int(str(leaving.code))
    out, err = capfd.readouterr()
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("stagewright")
    assert err.count("\n") == 1


def settings(*flags: str) -> TrainSettings:
    return train_settings(build_parser().parse_args(["train", *flags]))


def test_the_defaults_are_those_of_the_settings() -> None:
    assert settings() == TrainSettings(schedule=create("1f1b", num_ranks=2, num_microbatches=4))


def test_every_flag_reaches_its_setting() -> None:
    flags = (
        "--schedule gpipe --ranks 3 --microbatches 5 --data text --sequence 32 --batch-size 10 --layers 6 --hidden 48 "
        "--heads 2 --dropout 0.1 --tie --cut measured --profile gpt.json "
        "--steps 7 --optimizer muon --lr 0.01 --clip 0.5 --accumulate 2 --dtype bfloat16 "
        "--recompute 3 --seed 3 --sample def class --sample-bytes 9 --temperature 0 --metrics out.jsonl --quiet"
    )
    assert settings(*flags.split()) == TrainSettings(
        schedule=create("gpipe", num_ranks=3, num_microbatches=5),
        data=Path("text"),
        sequence=32,
        batch_size=10,
        layers=6,
        hidden=48,
        heads=2,
        dropout=0.1,
        tie=True,
        cut="measured",
        profile=Path("gpt.json"),
        steps=7,
        optimizer="muon",
        lr=0.01,
        clip=0.5,
        accumulate=2,
        dtype="bfloat16",
        recompute=3,
        seed=3,
        sample=("def", "class"),
        sample_bytes=9,
        temperature=0.0,
        metrics=Path("out.jsonl"),
        quiet=True,
    )


@pytest.mark.parametrize(("text", "meaning"), [("off", "off"), ("full", "full"), ("0", 0), ("12", 12)])
def test_what_may_be_recomputed(text: str, meaning: str | int) -> None:
    assert settings("--recompute", text).recompute == meaning


@pytest.mark.parametrize(
    ("flags", "reporter"),
    [
        ("--schedule 1f1b --ranks 4", 3),
        ("--schedule interleaved --ranks 4", 3),
        ("--schedule zbv --ranks 4", 0),  # the last stage is where a V comes back to
        ("--schedule dualpipe --ranks 4", 0),  # both ends have it, and together the loss
        ("--schedule 1f1b --ranks 1", 0),
    ],
)
def test_the_first_rank_that_has_the_last_stage_reports(flags: str, reporter: int) -> None:
    assert settings(*flags.split()).reporter == reporter


@pytest.mark.parametrize(
    ("flags", "version"),
    [
        ("--schedule 1f1b", 50),
        ("--schedule 1f1b --accumulate 3", 50),
        ("--schedule 2bw", 50),
        ("--schedule pipedream --microbatches 6", 300),
    ],
)
def test_the_last_weight_version_counts_the_updates(flags: str, version: int) -> None:
    assert settings("--steps", "50", *flags.split()).version == version


@pytest.mark.parametrize(
    ("flags", "batch_size", "num_microbatches"),
    [
        ("--global-batch-size 24 --micro-batch-size 4", 24, 6),
        ("--batch-size 24 --micro-batch-size 4", 24, 6),
        ("--micro-batch-size 4", 16, 4),
        ("--global-batch-size 24", 24, 4),
        ("--batch-size 24 --global-batch-size 24 --microbatches 3", 24, 3),
    ],
)
def test_batch_sizes_the_megatron_way(flags: str, batch_size: int, num_microbatches: int) -> None:
    chosen = settings(*flags.split())
    assert (chosen.batch_size, chosen.schedule.num_microbatches) == (batch_size, num_microbatches)


def test_torchrun_decides_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    assert settings().schedule.num_ranks == 3
    assert main(["train", "--ranks", "2"]) == 2
    assert "torchrun has started 3 ranks: got --ranks 2" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")  # one rank speaks for all
    assert main(["train", "--ranks", "2"]) == 2
    assert capsys.readouterr().err == ""


def test_torchrun_ranks_are_dealt_to_the_replicas(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("RANK", "0")
    chosen = settings("--dp", "2")
    assert (chosen.schedule.num_ranks, chosen.dp, chosen.num_ranks, chosen.reporter) == (3, 2, 6, 4)
    assert settings("--dp", "3", "--ranks", "2").schedule.num_ranks == 2
    assert main(["train", "--dp", "4"]) == 2
    assert "got --ranks 1 and --dp 4; give a --dp that divides them" in capsys.readouterr().err
    assert main(["train", "--dp", "2", "--ranks", "2"]) == 2
    assert "torchrun has started 6 ranks: got --ranks 2 and --dp 2; leave it out" in capsys.readouterr().err


def test_replicas_share_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = settings("--dp", "2", "--batch-size", "16", "--micro-batch-size", "2")
    assert (chosen.batch_size, chosen.schedule.num_microbatches) == (16, 4)
    assert main(["train", "--dp", "3", "--batch-size", "16", "--micro-batch-size", "2"]) == 2
    assert "--batch-size 16 is not a multiple of --dp 3 x --micro-batch-size 2" in capsys.readouterr().err
    assert main(["train", "--dp", "2", "--batch-size", "6", "--microbatches", "4"]) == 2
    assert "4 microbatches in each of 2 replicas; use --batch-size 8" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "show", "train"])
def test_help_teaches_by_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([*command.split(), "--help"])
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    assert f"examples:\n  stagewright {command}".rstrip() in out


MY_SCHEDULES = """
from dataclasses import dataclass
from typing import ClassVar

from stagewright.schedules import Schedule, register
from stagewright.schedules.instructions import Backward, Forward


@register
@dataclass(frozen=True)
class Mine(Schedule):
    name: ClassVar[str] = "mine"
    summary: ClassVar[str] = "the last first"

    def order(self, rank):
        microbatches = range(self.num_microbatches)
        return [Forward(rank, k) for k in microbatches] + [Backward(rank, k) for k in reversed(microbatches)]
"""


def test_a_schedule_of_ones_own_is_found_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "my_schedules.py").write_text(MY_SCHEDULES)
    script = Path(sys.executable).with_name("stagewright")
    flags = ["show", "mine", "--schedule-module", "my_schedules", "--ranks", "1", "--microbatches", "2"]
    done = subprocess.run([script, *flags], cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.stderr == ""
    assert "rank 0  F0 F1 B1 -- B0 --\n" in done.stdout
