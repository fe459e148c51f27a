"""What old gradients do to learning, and what helps: the validation loss of a small GPT under 1f1b, 2bw and pipedream.

`python -m stagewright.bench.staleness`. All variants see the same tokens in the same order, from the same weights,
with the learning rates of `stagewright train`; seeds change weights and order. Ranks are threads, since results do not
depend on that, and several trainings run side by side.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any, Final

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from stagewright.cli.batches import Batches
from stagewright.cli.corpus import Corpus, load_standard_library
from stagewright.cli.optimizer import make_optimizer
from stagewright.cli.settings import TrainSettings
from stagewright.cli.trainer import gpt_config, learning_rate, set_learning_rate, validate
from stagewright.cli.values import count
from stagewright.engine import (
    DiscrepancyCorrection,
    ErrorFeedback,
    LearningRateDiscount,
    Pipeline,
    RankContext,
    WeightPrediction,
    launch_local,
)
from stagewright.engine.staleness import Remedy
from stagewright.models import build_gpt_stage, token_loss
from stagewright.schedules import create

# Over which part of the updates a discount of the learning rate fades.
_DISCOUNTED: Final = 0.25


@dataclass(frozen=True)
class Variant:
    """One line of the table.

    Args:
        schedule, optimizer: by name.
        remedies: against staleness, for a number of updates.
    """

    schedule: str
    optimizer: str = "adamw"
    remedies: Callable[[int], Sequence[Remedy]] = lambda num_updates: ()


@dataclass(frozen=True)
class Run:
    """A variant trained from one seed.

    Args:
        variant: its name.
        seed: of weights and data.
        losses: of every batch.
        validation_loss: in the end, in nats a token.
    """

    variant: str
    seed: int
    losses: list[float]
    validation_loss: float


def _discount(num_updates: int) -> Sequence[Remedy]:
    return [LearningRateDiscount(max(int(_DISCOUNTED * num_updates), 1))]


def _prediction(num_updates: int) -> Sequence[Remedy]:
    return [WeightPrediction()]


def _correction(num_updates: int) -> Sequence[Remedy]:
    return [DiscrepancyCorrection()]


def _feedback(num_updates: int) -> Sequence[Remedy]:
    return [ErrorFeedback()]


VARIANTS: Final[Mapping[str, Variant]] = MappingProxyType(
    {
        "1f1b": Variant("1f1b"),
        "2bw": Variant("2bw"),
        "2bw + discount": Variant("2bw", remedies=_discount),
        "2bw + prediction": Variant("2bw", remedies=_prediction),
        "2bw + discrepancy": Variant("2bw", remedies=_correction),
        "2bw + feedback": Variant("2bw", remedies=_feedback),
        "pipedream": Variant("pipedream"),
        "1f1b, muon": Variant("1f1b", "muon"),
        "2bw, muon": Variant("2bw", "muon"),
        "2bw + feedback, muon": Variant("2bw", "muon", _feedback),
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all variants, print the table, and write what was asked for."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    unknown = [name for name in parsed.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"there is no variant {unknown[0]!r}: there are {', '.join(map(repr, VARIANTS))}")
    settings = _settings(parsed)
    console = Console()
    console.print(
        f"validation loss after {parsed.steps} batches of {settings.tokens_per_step:,} tokens, P={parsed.ranks} "
        f"M={parsed.microbatches}, nats a token",
        style="bold",
        highlight=False,
    )
    runs = train_all(parsed.variants, range(parsed.seeds), settings, parsed.ranks, parsed.microbatches, parsed.jobs)
    console.width = max(console.width, 110)
    console.print(table_of(runs, parsed.variants))
    console.print(
        "mean ± standard deviation over the seeds; the difference is that to 1f1b under the same optimizer, seed by "
        "seed. pipedream makes an update with every microbatch, all others one with every batch.",
        style="dim",
        highlight=False,
    )
    if parsed.output is not None:
        result = {"settings": _described(settings, parsed), "runs": [asdict(run) for run in runs]}
        parsed.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stagewright.bench.staleness", description=__doc__)
    parser.add_argument("--steps", type=count, default=300, metavar="N", help="batches (default 300)")
    parser.add_argument("--seeds", type=count, default=3, metavar="N", help="trainings of each variant (default 3)")
    parser.add_argument(
        "--variants", nargs="+", default=list(VARIANTS), metavar="NAME", help=f"of {', '.join(map(repr, VARIANTS))}"
    )
    parser.add_argument("--lr", type=float, default=1e-3, help="largest learning rate (default 1e-3)")
    parser.add_argument("--ranks", type=count, default=4, metavar="P", help="of the pipeline (default 4)")
    parser.add_argument("--microbatches", type=count, default=4, metavar="M", help="of a batch (default 4)")
    parser.add_argument("--jobs", type=count, default=2, metavar="N", help="trainings at a time (default 2)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all runs to this JSON file")
    return parser


def _settings(parsed: argparse.Namespace) -> TrainSettings:
    """What all variants have in common."""
    schedule = create("1f1b", num_ranks=parsed.ranks, num_microbatches=parsed.microbatches)
    return TrainSettings(
        schedule=schedule,
        sequence=64,
        batch_size=8,
        layers=max(4, parsed.ranks),
        hidden=64,
        steps=parsed.steps,
        lr=parsed.lr,
    )


def _described(settings: TrainSettings, parsed: argparse.Namespace) -> dict[str, Any]:
    names = ("sequence", "batch_size", "layers", "hidden", "heads", "steps", "lr")
    shape = {"num_ranks": parsed.ranks, "num_microbatches": parsed.microbatches, "num_seeds": parsed.seeds}
    return {name: getattr(settings, name) for name in names} | shape


def train_all(
    variants: Sequence[str],
    seeds: Sequence[int],
    settings: TrainSettings,
    num_ranks: int,
    num_microbatches: int,
    num_jobs: int,
) -> list[Run]:
    """Train every variant from every seed, some at a time; in the order of variants, then seeds."""
    wanted = [(variant, seed) for seed in seeds for variant in variants]
    shape = (num_ranks, num_microbatches)
    of_jobs = launch_local(_work, num_jobs, args=(wanted, settings, shape))
    done = {(run.variant, run.seed): run for runs in of_jobs for run in runs}
    return [done[variant, seed] for variant in variants for seed in seeds]


def _work(
    context: RankContext, wanted: Sequence[tuple[str, int]], settings: TrainSettings, shape: tuple[int, int]
) -> list[Run]:
    """One job's share of the trainings."""
    torch.set_num_threads(1)
    corpus = load_standard_library()
    return [train(name, seed, settings, shape, corpus) for name, seed in wanted[context.rank :: context.num_ranks]]


def train(name: str, seed: int, settings: TrainSettings, shape: tuple[int, int], corpus: Corpus) -> Run:
    """Train a variant from a seed, with ranks as threads."""
    schedule = create(VARIANTS[name].schedule, num_ranks=shape[0], num_microbatches=shape[1])
    own = TrainSettings(
        **{field: getattr(settings, field) for field in settings.__dataclass_fields__}
        | {"schedule": schedule, "seed": seed, "optimizer": VARIANTS[name].optimizer}
    )
    of_ranks = launch_local(_train_rank, shape[0], backend="threads", args=(own, VARIANTS[name], corpus))
    losses, validation_loss = next(result for result in of_ranks if result is not None)
    return Run(name, seed, losses, validation_loss)


def _train_rank(
    context: RankContext, settings: TrainSettings, variant: Variant, corpus: Corpus
) -> tuple[list[float], float] | None:
    """One rank: the loss of every batch, and that of the validation text, where the last stage lives."""
    schedule = settings.schedule
    batches = Batches(corpus.train, settings.sequence, settings.batch_size, settings.seed)
    losses: list[torch.Tensor] = []
    with Pipeline(
        partial(build_gpt_stage, gpt_config(settings), num_stages=schedule.num_stages, seed=settings.seed),
        schedule=schedule,
        loss_fn=token_loss,
        optimizer=partial(make_optimizer, settings.optimizer, settings.lr),
        transport=context.transport,
        seed=settings.seed,
        staleness=variant.remedies(settings.version),
    ) as pipe:
        for step in range(settings.steps):
            set_learning_rate(pipe.optimizer, learning_rate(step, settings))
            loss = pipe.train_step(*batches.batch(step))
            losses += [] if loss is None else [loss]
        validation_loss = validate(pipe, context, settings, corpus)
    return None if validation_loss is None else ([float(loss) for loss in losses], validation_loss)


def table_of(runs: Sequence[Run], variants: Sequence[str]) -> Table:
    """Every variant with its loss, and the difference to 1f1b."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("variant", no_wrap=True)
    for heading in ("validation loss", "to 1f1b", "seed by seed"):
        table.add_column(heading, justify="right", no_wrap=True)
    losses = {(run.variant, run.seed): run.validation_loss for run in runs}
    seeds = sorted({run.seed for run in runs})
    for name in variants:
        reference = "1f1b" if VARIANTS[name].optimizer == "adamw" else f"1f1b, {VARIANTS[name].optimizer}"
        own = [losses[name, seed] for seed in seeds]
        differences = [losses[name, seed] - losses[reference, seed] for seed in seeds if (reference, seed) in losses]
        compared = differences and name != reference
        table.add_row(
            name,
            _spread(own, ".4f"),
            _spread(differences, "+.4f") if compared else "",
            " ".join(f"{loss:.4f}" for loss in own),
        )
    return table


def _spread(values: Sequence[float], form: str) -> str:
    mean = format(fmean(values), form)
    return f"{mean} ± {stdev(values):.4f}" if len(values) > 1 else mean


if __name__ == "__main__":
    sys.exit(main())
