"""`stagewright profile`, and training on the cut that comes of it."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.cli import cutting
from stagewright.cli.corpus import Corpus, load_corpus
from stagewright.cli.cutting import read_profile, settle_cut
from stagewright.cli.main import main
from stagewright.cli.metrics import StepMetrics, TrainResult
from stagewright.cli.profile_costs import costs_of_profile, costs_text
from stagewright.cli.report import Silence
from stagewright.cli.settings import TrainSettings
from stagewright.cli.trainer import gpt_config, train
from stagewright.engine import RankContext, launch_local
from stagewright.models import GPT, Cut, GPTConfig, PartProfile, Profile
from stagewright.models.cut import parts_of_transformer
from stagewright.schedules import Costs, create, simulate

SMALL = "--layers 3 --hidden 8 --heads 2 --sequence 4 --rounds 1"
SHAPE: dict[str, Any] = {"layers": 4, "hidden": 16, "heads": 2, "sequence": 16, "batch_size": 8, "steps": 6, "seed": 1}


def profile_of(*durations: float) -> Profile:
    """A profile whose parts take so many milliseconds: a quarter forward, a quarter I, half W; and as many bytes."""
    parts = parts_of_transformer(len(durations) - 2)
    layers, hidden, heads, sequence = len(parts) - 2, SHAPE["hidden"], SHAPE["heads"], SHAPE["sequence"]
    model = GPT(GPTConfig(num_layers=layers, hidden_size=hidden, num_heads=heads, sequence_length=sequence))
    return Profile(
        tuple(
            PartProfile(
                part.name, part.kind, ms / 4000, 3 * ms / 4000, ms / 4000, ms / 2000, int(ms), int(8 * ms), size, 8
            )
            for part, ms, size in zip(parts, durations, model.num_parameters(), strict=True)
        ),
        num_rows=4,
        dtype="float32",
        device="cpu",
    )


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(profile_of(4, 8, 4, 4, 4, 8).to_json())
    return path


def test_every_part_has_a_row_and_the_file_has_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpt.json"
    assert main(["profile", *SMALL.split(), "--out", str(path)]) == 0
    out = capsys.readouterr().out
    profile = read_profile(path)
    assert [part.name for part in profile.parts] == ["embedding", "layers.0", "layers.1", "layers.2", "head"]
    assert profile.num_rows == 4
    for part in profile.parts:
        row = next(line for line in out.splitlines() if line.startswith(part.name)).split()
        assert row[1:] == [
            f"{1000 * part.forward:.3f}",
            f"{1000 * part.backward:.3f}",
            f"{1000 * part.input_gradient:.3f}",
            f"{1000 * part.weight_gradient:.3f}",
            f"{part.activation_bytes / 1024:.1f}",
            f"{part.output_bytes / 1024:.1f}",
            str(part.num_parameters),
        ]
    assert "for a microbatch of 4 x 4 bytes in float32 on one" in out


def test_stages_are_cut_and_their_costs_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *SMALL.split(), "--stages", "2", "--dtype", "float64"]) == 0
    out = capsys.readouterr().out
    (layout,) = re.findall(r"^cut +layout=(\S+)$", out, re.MULTILINE)
    assert re.fullmatch(r"Et*\|t*L", layout)
    (costs,) = re.findall(r"^costs +(\S+)$", out, re.MULTILINE)
    assert main(["show", "zb-h1", "--ranks", "2", "--microbatches", "4", "--costs", costs]) == 0
    assert "bubble fraction" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"profile {SMALL} --stages 4", "every stage needs at least 1 layer: got 3 layers for 4 stages"),
        (f"profile {SMALL} --out no/such/folder/file", "cannot write the profile to no/such/folder/file: No such file"),
        ("profile --heads 3", "num_heads must divide hidden_size"),
        ("profile --rounds 0", "argument --rounds: a whole number from 1 up is needed: got '0'"),
        ("train --cut by-hand", "argument --cut: even, parameters, measured, counts=N,N,… or layout=Et|…|tL is needed"),
        ("train --cut counts=1,-1", "argument --cut: even"),
        ("train --cut counts=", "argument --cut: even"),
        ("train --cut even=1", "argument --cut: even"),
        ("train --cut counts=1,2,1", "every stage has its count of layers: got 3 counts for 2 stages; give 2"),
        ("train --cut counts=1,2", "got counts of 1, 2, together 3, for 4 layers; make them add up to 4"),
        ("train --cut layout=Et*4|mL", "m is a multi-token-prediction layer, and this model has none"),
        ("train --cut layout=Et*4L", "a layout says what each of 2 stages holds: got 1 in 'Et*4L'; use 1 |"),
        ("train --cut parameters --layers 1", "every stage needs at least 1 layer: got 1 layers for 2 stages"),
        ("train --cut measured --layers 1", "every stage needs at least 1 layer: got 1 layers for 2 stages"),
        ("train --profile gpt.json", "--profile is for --cut measured: got --cut even; give that, or no --profile"),
        ("train --cut measured --profile no/such/file", "cannot read the profile no/such/file: No such file"),
        ("train --cut measured --profile README.md", "README.md: a profile is JSON: Expecting value"),
    ],
)
def test_wrong_input_gets_one_line(command: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(command.split())
    except SystemExit as leaving:  # which is how argparse ends
        code = int(str(leaving.code))
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("stagewright")
    assert err.count("\n") == 1


def test_the_profile_of_another_model_is_refused(profile_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--cut", "measured", "--profile", str(profile_file), "--layers", "5"]) == 2
    assert "got one of 6 parts, embedding to head, for a model of 7, embedding to head" in capfd.readouterr().err
    assert main(["train", "--cut", "measured", "--profile", str(profile_file), "--layers", "4", "--hidden", "32"]) == 2
    assert "got one whose part 0, embedding, has " in capfd.readouterr().err


def test_the_costs_of_a_stage_are_those_of_its_parts() -> None:
    costs = costs_of_profile(profile_of(4, 8, 4, 4, 4, 8), Cut((2, 3, 1)))
    assert costs.forward == pytest.approx((0.003, 0.003, 0.002))
    assert costs.backward == pytest.approx((0.009, 0.009, 0.006))
    assert costs.input_gradient == pytest.approx((0.003, 0.003, 0.002))
    assert costs.weight_gradient == pytest.approx((0.006, 0.006, 0.004))
    assert costs.message_bytes == (64, 32, 64)
    assert costs.weight_bytes == (12, 12, 8)
    assert costs_text(costs) == "F=3:3:2,B=9:9:6,I=3:3:2,W=6:6:4"


def test_they_predict_what_a_cut_is_worth() -> None:
    profile = profile_of(1, 1, 1, 1, 1, 7)
    program = create("1f1b", num_ranks=2, num_microbatches=8).program()
    even, best = (simulate(program, costs_of_profile(profile, Cut(sizes))) for sizes in ((3, 3), (5, 1)))
    assert best.makespan < even.makespan
    assert even.makespan == pytest.approx(simulate(program, Costs(forward=(3, 9), backward=(9, 27))).makespan / 4000)


def test_costs_of_another_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="got one of 3 parts for a profile of 6; cut the model that was profiled"):
        costs_of_profile(profile_of(4, 8, 4, 4, 4, 8), Cut((2, 1)))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"the quick brown fox number {number} jumps over the lazy dog\n" * 3)
    return folder


class Heard(Silence):
    """Keeps the losses and the result."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.cut = ""

    def step_done(self, metrics: StepMetrics) -> None:
        """Keep this one."""
        self.losses.append(metrics.loss)

    def run_done(self, result: TrainResult) -> None:
        """Keep the cut."""
        self.cut = result.cut


def rank_of_training(settings: TrainSettings, corpus: Corpus, context: RankContext) -> Heard:
    """What one rank hears of."""
    heard = Heard()
    train(context, settings, corpus, heard)
    return heard


def trained(text: Path, num_ranks: int, name: str = "1f1b", **changes: Any) -> Heard:
    """What the reporter hears of a training in threads."""
    schedule = create(name, num_ranks=num_ranks, num_microbatches=4)
    settings = TrainSettings(schedule, data=text, **{**SHAPE, **changes})
    results = launch_local(
        partial(rank_of_training, settings, load_corpus(text)), settings.num_ranks, backend="threads"
    )
    heard: Heard = results[settings.reporter]
    return heard


def test_every_cut_has_the_same_losses(text: Path, profile_file: Path) -> None:
    alone = trained(text, 1, dropout=0.1, tie=True).losses
    assert len(alone) == 6
    cuts = {
        "even": "Ett|ttL",
        "parameters": "Ett|ttL",
        "counts=1,3": "Et|tttL",
        "layout=Et*4|L": "Et*4|L",
        "layout=E|t*4L": "E|t*4L",
    }
    for cut, layout in cuts.items():
        heard = trained(text, 2, dropout=0.1, tie=True, cut=cut)
        assert heard.cut == layout
        assert heard.losses == pytest.approx(alone, abs=5e-5), cut
    heard = trained(text, 2, dropout=0.1, tie=True, cut="measured", profile=profile_file)
    assert heard.cut == "Ett|ttL"
    assert heard.losses == pytest.approx(alone, abs=5e-5)


def test_a_cut_may_have_several_stages_a_rank(text: Path) -> None:
    heard = trained(text, 2, "zbv", cut="layout=E|tt|tt|L")
    assert heard.cut == "E|tt|tt|L"
    assert heard.losses == pytest.approx(trained(text, 1).losses, abs=5e-5)


def cut_of_rank(settings: TrainSettings, context: RankContext) -> Cut:
    """The cut that a rank uses."""
    return settle_cut(settings, gpt_config(settings), context)


def test_the_first_rank_alone_measures_and_all_use_its_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(settings: TrainSettings, config: Any, device: Any) -> Profile:
        measured.append(profile_of(*([4] * 5), 4 * (5 + len(measured))))  # another one each time
        return measured[-1]

    monkeypatch.setattr(cutting, "profile_of", measure)
    settings = TrainSettings(create("1f1b", num_ranks=3, num_microbatches=4), **SHAPE, cut="measured")
    assert launch_local(partial(cut_of_rank, settings), 3, backend="threads") == [Cut((2, 3, 1))] * 3
    assert len(measured) == 1


def test_what_is_measured_on_the_spot_is_the_microbatch_that_is_trained() -> None:
    schedule = create("1f1b", num_ranks=2, num_microbatches=4)
    settings = TrainSettings(schedule, **{**SHAPE, "batch_size": 10}, dtype="float64", cut="measured")
    profile = cutting.profile_of(settings, gpt_config(settings), torch.device("cpu"))
    assert (profile.num_rows, profile.dtype, len(profile.parts)) == (3, "float64", 6)
    assert profile.parts[1].output_bytes == 3 * 16 * 16 * 8


def test_training_on_what_is_measured_on_the_spot(text: Path) -> None:
    heard = trained(text, 2, cut="measured")
    assert re.fullmatch(r"E(t\*4|t*)\|(t\*4|t*)L", heard.cut)
    assert heard.losses == pytest.approx(trained(text, 1).losses, abs=5e-5)
