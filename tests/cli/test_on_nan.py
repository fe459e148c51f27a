"""`--on-nan`: what a training does about a loss that is no number."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stagewright.cli.arguments import build_parser
from stagewright.cli.corpus import Corpus, load_corpus
from stagewright.cli.metrics import Silence, TrainResult
from stagewright.cli.settings import TrainSettings
from stagewright.cli.train_arguments import train_settings
from stagewright.cli.train_command import check
from stagewright.cli.trainer import train
from stagewright.engine import NotFiniteError, RankContext, launch_local
from stagewright.schedules import ScheduleError, create

# After the first update, which does not look at the size of the gradient, there is nothing but infinity.
DIVERGING: dict[str, Any] = {
    "layers": 2, "hidden": 16, "heads": 2, "sequence": 16, "batch_size": 8, "steps": 4, "lr": 1e38, "optimizer": "sgd"
}  # fmt: skip


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"the quick brown fox number {number} jumps over the lazy dog\n" * 3)
    return load_corpus(tmp_path)


def train_rank(settings: TrainSettings, corpus: Corpus, context: RankContext) -> Any:
    return train(context, settings, corpus, Silence())


def run(on_nan: Any, corpus: Corpus) -> TrainResult:
    schedule = create("1f1b", num_ranks=2, num_microbatches=4)
    settings = TrainSettings(schedule, on_nan=on_nan, **DIVERGING)
    results = launch_local(partial(train_rank, settings, corpus), 2, backend="threads")
    result = results[settings.reporter]
    assert isinstance(result, TrainResult)
    return result


def test_raise_ends_with_the_step_and_microbatch(corpus: Corpus) -> None:
    with pytest.raises(NotFiniteError, match=r"loss of microbatch 0 is NaN or infinite \(step 1\)"):
        run("raise", corpus)


def test_skip_goes_on_and_says_what_was_skipped(corpus: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    result = run("skip", corpus)
    assert math.isfinite(result.first_loss)
    assert [record.message.partition(" (")[2] for record in caplog.records if "NaN" in record.message] == [
        f"step {step}): no rank makes this update" for step in (1, 2, 3)
    ]


def test_nobody_looks_by_default(corpus: Corpus) -> None:
    assert not math.isfinite(run(None, corpus).last_loss)


@pytest.mark.parametrize(
    ("flags", "on_nan"), [([], None), (["--on-nan", "raise"], "raise"), (["--on-nan", "skip"], "skip")]
)
def test_the_flag_is_the_setting(flags: list[str], on_nan: str | None) -> None:
    assert train_settings(build_parser().parse_args(["train", *flags])).on_nan == on_nan


def test_a_schedule_whose_stages_update_by_themselves_is_refused_before_any_rank_starts() -> None:
    flags = ["train", "--schedule", "pipedream", "--on-nan", "skip"]
    with pytest.raises(ScheduleError, match="pipedream updates each stage by itself"):
        check(train_settings(build_parser().parse_args(flags)))
