"""`stagewright train`: check the settings, start ranks or join those that were started, print what came out."""

import gc
from contextlib import nullcontext
from functools import partial

from rich.console import Console

from stagewright.cli.batches import Batches
from stagewright.cli.console import PatientConsole
from stagewright.cli.corpus import Corpus, load_corpus
from stagewright.cli.cutting import check_cut
from stagewright.cli.launcher import is_first_rank, num_started_ranks, own_rank
from stagewright.cli.metrics import Preempted, Silence, TrainResult
from stagewright.cli.report import counted, open_metrics, open_report, print_result
from stagewright.cli.saving import check_saving, make_save_folder, nothing_left, resumed_updates
from stagewright.cli.settings import TrainSettings
from stagewright.cli.sigterm import sigterm_for_ranks
from stagewright.cli.tensorboard import import_writer, make_folder
from stagewright.cli.trace_file import check_trace
from stagewright.cli.trainer import gpt_config, train
from stagewright.engine import RankContext, from_environment, launch_local
from stagewright.engine.launch.environment import meeting_point, started_rank
from stagewright.engine.plan import plan_of, windows_of
from stagewright.schedules import ScheduleError


def check(settings: TrainSettings) -> Corpus:
    """Find what is wrong with the settings before any rank starts, and return the text they name.

    Raises ValueError.
    """
    schedule = settings.schedule
    num_microbatches = settings.dp * schedule.num_microbatches
    if settings.batch_size < num_microbatches:
        each = "" if settings.dp == 1 else f" in each of {settings.dp} replicas"
        raise ValueError(
            f"every microbatch needs a sequence: got a batch of {settings.batch_size} for {schedule.num_microbatches} "
            f"microbatches{each}; use --batch-size {num_microbatches} or fewer microbatches"
        )
    if settings.accumulate > 1 and not schedule.synchronous:
        raise ScheduleError(
            f"{schedule.name} makes its updates as the batches pass, and never stops between them to wait for another: "
            f"got --accumulate {settings.accumulate}; use --batch-size {settings.accumulate * settings.batch_size} "
            f"--microbatches {settings.accumulate * schedule.num_microbatches}, or a synchronous schedule"
        )
    check_cut(settings, gpt_config(settings), reads_profile=own_rank() in (None, 0))
    check_runs(settings)
    if settings.tensorboard is not None:
        import_writer()
    if (started := started_rank()) is not None:
        meeting_point(started)
    corpus = load_corpus(settings.data)
    for name, data in (("to train on", corpus.train), ("to validate on, about a tenth of all,", corpus.validation)):
        try:
            Batches(data, settings.sequence, settings.batch_size, settings.seed)
        except ValueError as error:
            raise ValueError(f"of the text {name} {error}") from error
    check_saving(settings, corpus)
    return corpus


def check_runs(settings: TrainSettings) -> None:
    """Find out whether the engine runs the schedule with these settings. Raises ScheduleError."""
    schedule = settings.schedule
    _, asynchronous = plan_of(schedule, schedule.num_ranks, None, {})
    if asynchronous is not None:
        tied_stages = frozenset({0, schedule.num_stages - 1}) if settings.ties_stages else frozenset()
        scalars = settings.clip is not None or settings.on_nan is not None or settings.dtype == "float16"
        windows_of(asynchronous, tied_stages, scalars=scalars)


def run(settings: TrainSettings, corpus: Corpus, console: Console) -> None:
    """Train, on ranks that are there already or on processes of this machine, and print the closing table.

    Raises MetricsError where the file of metrics cannot be written, on the rank that would.
    """
    if num_started_ranks() is not None:
        run_under_launcher(settings, corpus, console)
        return
    try:
        run_local(settings, corpus, console)
    finally:
        console.show_cursor()  # the rank that hid it may have been stopped before it could do this itself


def run_local(settings: TrainSettings, corpus: Corpus, console: Console) -> None:
    """Train on processes of this machine, one a rank."""
    check_metrics(settings)
    introduce(settings, corpus, console)
    with sigterm_for_ranks() if settings.save_on_sigterm else nullcontext():
        results = launch_local(partial(train_rank, settings), num_ranks=settings.num_ranks)
    print_result(settings, results[settings.reporter], console)


def run_under_launcher(settings: TrainSettings, corpus: Corpus, console: Console) -> None:
    """Train as one of the ranks that torchrun, mpirun or srun has started."""
    reports = own_rank() == settings.reporter
    if reports:
        check_metrics(settings)
    gc.freeze()  # as launch_local does: no collection amid a step need look at what was imported
    with from_environment() as context:
        check_same_text(context, corpus)
        if reports:
            introduce(settings, corpus, console)
        result = train_rank(settings, context)
    if result is not None:
        print_result(settings, result, console)


def train_rank(settings: TrainSettings, context: RankContext) -> TrainResult | Preempted | None:
    """Train as one rank; the one that has the loss also reports, and returns the result."""
    corpus = load_corpus(settings.data)
    if context.rank != settings.reporter:
        return train(context, settings, corpus, Silence())
    with open_report(settings, PatientConsole()) as report:
        return train(context, settings, corpus, report)


def check_metrics(settings: TrainSettings) -> None:
    """Find out now whether metrics and checkpoints can be written, where they will be. Raises MetricsError."""
    if settings.metrics is not None:
        open_metrics(settings).close()
    if settings.tensorboard is not None:
        make_folder(settings.tensorboard)
    if settings.trace is not None:
        check_trace(settings.trace)
    if settings.save is not None:
        make_save_folder(settings.save)


def has_finished(settings: TrainSettings, corpus: Corpus, console: Console) -> bool:
    """Whether the run is one that ``--resume`` would go on with, but that has come to its end; if so, say it."""
    num_updates = resumed_updates(settings, corpus)
    if num_updates is None or num_updates < settings.steps:
        return False
    if is_first_rank():
        console.print(f"{settings.save} has {nothing_left(num_updates, settings)}", highlight=False, soft_wrap=True)
    return True


def introduce(settings: TrainSettings, corpus: Corpus, console: Console) -> None:
    """Say what is about to be trained on what, unless quiet."""
    if settings.quiet:
        return
    schedule = settings.schedule
    accumulated = "" if settings.accumulate == 1 else f", {settings.accumulate} batches an update"
    replicated = "" if settings.dp == 1 else f" in each of {settings.dp} replicas"
    num_updates = resumed_updates(settings, corpus)
    resumed = "" if num_updates is None else f"\nresumes after step {num_updates}"
    console.print(
        f"{schedule.name}: {schedule.summary}\n"
        f"{counted(schedule.num_ranks, 'rank')}, {counted(schedule.num_stages, 'stage')}{replicated}; batches of "
        f"{counted(settings.batch_size, 'sequence')} of {settings.sequence} bytes in "
        f"{counted(schedule.num_microbatches, 'microbatch')}{accumulated}\n{corpus.description}{resumed}",
        highlight=False,
        soft_wrap=True,
    )


def check_same_text(context: RankContext, corpus: Corpus) -> None:
    """Refuse to train where ranks have read different text, for then inputs and targets would not belong together."""
    fingerprints = context.transport.gather(corpus.fingerprint.encode())
    strangers = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
    if strangers:
        raise ValueError(
            f"all ranks must read the same text: rank {strangers[0]} reads another than rank 0; "
            f"give --data a copy of the same files on every machine"
        )
