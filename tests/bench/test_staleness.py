"""The bench of staleness: every variant trains on the same data from the same weights, on any number of ranks."""

import json
from pathlib import Path

import pytest

from stagewright.bench import staleness
from stagewright.bench.staleness import VARIANTS, Run, table_of, train
from stagewright.cli.corpus import Corpus
from stagewright.cli.settings import TrainSettings
from stagewright.schedules import create

TEXT = b"The quick brown fox jumps over the lazy dog. " * 40
CORPUS = Corpus(TEXT, TEXT[:400], "a fox")


def settings(steps: int) -> TrainSettings:
    schedule = create("1f1b", num_ranks=2, num_microbatches=2)
    return TrainSettings(schedule, sequence=8, batch_size=4, layers=2, hidden=16, heads=2, steps=steps)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains(name: str) -> None:
    run = train(name, 1, settings(4), (2, 2), CORPUS)
    assert (run.variant, run.seed, len(run.losses)) == (name, 1, 4)
    assert run.validation_loss < run.losses[0]


@pytest.mark.parametrize("name", ["1f1b", "2bw", "2bw + prediction"])
def test_the_number_of_ranks_does_not_matter(name: str) -> None:
    one, two = (train(name, 0, settings(4), (num_ranks, 2), CORPUS) for num_ranks in (1, 2))
    assert one.losses == pytest.approx(two.losses, rel=1e-4)
    assert one.validation_loss == pytest.approx(two.validation_loss, rel=1e-4)


def test_variants_start_alike_and_seeds_do_not() -> None:
    first = train("1f1b", 0, settings(1), (2, 2), CORPUS).losses[0]
    assert train("2bw", 0, settings(1), (2, 2), CORPUS).losses[0] == pytest.approx(first, rel=1e-6)
    assert train("1f1b", 1, settings(1), (2, 2), CORPUS).losses[0] != pytest.approx(first, rel=1e-6)


def test_the_table_compares_seed_by_seed_under_one_optimizer() -> None:
    losses = {"1f1b": (1.0, 3.0), "2bw": (1.5, 3.7), "1f1b, muon": (0.9, 2.9), "2bw, muon": (0.9, 2.9)}
    runs = [Run(name, seed, [], loss) for name, of_seeds in losses.items() for seed, loss in enumerate(of_seeds)]
    columns = [list(column.cells) for column in table_of(runs, list(losses)).columns]
    assert columns[0] == list(losses)
    assert columns[1][:2] == ["2.0000 ± 1.4142", "2.6000 ± 1.5556"]
    assert columns[2] == ["", "+0.6000 ± 0.1414", "", "+0.0000 ± 0.0000"]
    assert columns[3][1] == "1.5000 3.7000"


@pytest.mark.slow
def test_it_writes_what_it_has_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.json"
    arguments = ["--steps", "2", "--seeds", "2", "--ranks", "2", "--microbatches", "2", "--output", str(file)]
    assert staleness.main([*arguments, "--variants", "1f1b", "2bw"]) == 0
    assert "2bw" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["settings"]["steps"] == 2
    assert [(run["variant"], run["seed"]) for run in result["runs"]] == [
        ("1f1b", 0),
        ("1f1b", 1),
        ("2bw", 0),
        ("2bw", 1),
    ]
    assert all(len(run["losses"]) == 2 for run in result["runs"])


def test_an_unknown_variant_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        staleness.main(["--variants", "3bw"])
    assert "there is no variant '3bw': there are '1f1b', '2bw'" in capsys.readouterr().err
