"""A GPT trained over a pipeline: what a trainer that embeds stagewright looks like.

`train` runs in every rank. It knows nothing of terminals and files: what happens is told to a listener, on the one
rank that has the loss.
"""

import math
import struct
import time
from functools import partial
from statistics import fmean
from typing import Final

import torch
from torch import Tensor

from stagewright.cli.batches import Batches
from stagewright.cli.bubble import MeasuredStep, compare_bubble
from stagewright.cli.corpus import Corpus, unigram_bits_per_byte
from stagewright.cli.cutting import settle_cut
from stagewright.cli.metrics import Listener, Preempted, StepMetrics, TrainResult
from stagewright.cli.optimizer import make_optimizer
from stagewright.cli.sample import continue_prompts
from stagewright.cli.saving import open_saving
from stagewright.cli.settings import TrainSettings
from stagewright.engine import Pipeline, RankContext, make_mesh
from stagewright.models import GPT, TIED_WEIGHTS, Cut, GPTConfig, build_stage, layout_of, token_loss
from stagewright.schedules.recording import Recording

NUM_MEASURED_STEPS: Final = 10
NUM_VALIDATION_BATCHES: Final = 16
NUM_WARMUP_STEPS: Final = 20


def train(
    context: RankContext, settings: TrainSettings, corpus: Corpus, listener: Listener
) -> TrainResult | Preempted | None:
    """Train, validate, and measure the bubble. Every rank calls this; `settings.reporter` gets the result."""
    batches = Batches(corpus.train, settings.sequence, settings.batch_size, settings.seed)
    history: list[StepMetrics] = []
    measured: list[MeasuredStep] = []
    cut = settle_cut(settings, gpt_config(settings), context)
    with open_pipeline(context, settings, cut) as pipe, open_saving(pipe, settings, corpus, context) as saving:
        for step in range(saving.resume(), settings.steps):
            set_learning_rate(pipe.optimizer, learning_rate(step, settings))
            start = time.perf_counter()
            loss = update(pipe, settings, batches, step)
            seconds = time.perf_counter() - start
            if loss is not None:
                history.append(metrics_of(pipe, settings, step, loss, seconds))
                listener.step_done(history[-1])
            if step in measured_steps(settings.steps, synchronous=settings.schedule.synchronous):
                measured.append(measure(pipe, seconds))
            saving.step_done()
            if saving.is_preempted:
                saving.last_step_done()
                return Preempted(step + 1) if context.rank == settings.reporter else None
        recording = None if settings.trace is None else record(pipe, settings)
        saving.last_step_done()
        pipe.flush()
        validation_loss = validate(pipe, context, settings, corpus)
        continuations = sample(pipe, settings)
        loss_scale = pipe.loss_scale if settings.dtype == "float16" else None
    if validation_loss is None:
        return None

    later = history[1:] or history  # the first step also makes buffers
    result = TrainResult(
        first_loss=history[0].loss,
        last_loss=history[-1].loss,
        validation_loss=validation_loss,
        version=settings.version,
        cut=layout_of(GPT(gpt_config(settings)).parts, cut),
        unigram_bits=unigram_bits_per_byte(corpus.train, corpus.validation),
        tokens_per_second=settings.tokens_per_step / fmean(metrics.step_seconds for metrics in later),
        bubble=compare_bubble(settings.schedule, measured),
        loss_scale=loss_scale,
        recording=recording,
        continuations=continuations,
    )
    listener.run_done(result)
    return result


def open_pipeline(context: RankContext, settings: TrainSettings, cut: Cut) -> Pipeline:
    """Build this rank's stages and what trains them."""
    schedule = settings.schedule
    dtype = getattr(torch, settings.dtype)
    build = partial(build_stage, GPT(gpt_config(settings)), cut, seed=settings.seed)
    return Pipeline(
        partial(build, dtype=dtype),
        schedule=schedule,
        num_microbatches=schedule.num_microbatches,
        loss_fn=partial(share_of_loss, num_batches=settings.accumulate),
        optimizer=partial(make_optimizer, settings.optimizer, settings.lr),
        mesh=make_mesh(pp=schedule.num_ranks, dp=settings.dp, context=context) if settings.dp > 1 else None,
        transport=context.transport if settings.dp == 1 else None,
        seed=settings.seed,
        recompute=settings.recompute,
        tied=[TIED_WEIGHTS] if settings.ties_stages else [],
        max_norm=settings.clip,
        timeout=settings.timeout,
        on_nan=settings.on_nan,
        master_weights=settings.dtype in ("bfloat16", "float16"),
        loss_scale="dynamic" if settings.dtype == "float16" else None,
    )


def gpt_config(settings: TrainSettings) -> GPTConfig:
    """The shape of the model that the settings ask for. Raises ValueError for sizes that do not fit together."""
    return GPTConfig(
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        num_heads=settings.heads,
        sequence_length=settings.sequence,
        dropout=settings.dropout,
        tied=settings.tie,
    )


def share_of_loss(logits: Tensor, targets: Tensor, *, num_batches: int) -> Tensor:
    """The loss of a batch as its share of the mean over those that one update is made of."""
    return token_loss(logits, targets) / num_batches


def update(pipe: Pipeline, settings: TrainSettings, batches: Batches, step: int) -> float | None:
    """Make one update of one batch or several, and return their mean loss where the last stage lives.

    Gradients of all but the last batch wait in `.grad`, where those of the last one join them before the update.
    """
    first = step * settings.accumulate
    last = first + settings.accumulate - 1
    shares = [pipe.forward_backward(*share_of_batch(pipe, batches.batch(index))) for index in range(first, last)]
    shares.append(pipe.train_step(*share_of_batch(pipe, batches.batch(last))))
    known = [float(share) for share in shares if share is not None]
    return sum(known) if known else None


def validate(pipe: Pipeline, context: RankContext, settings: TrainSettings, corpus: Corpus) -> float | None:
    """Mean loss over a fixed number of batches of the held-out text, the same ones in every run."""
    batches = Batches(corpus.validation, settings.sequence, settings.batch_size, seed=0)
    num_batches = min(NUM_VALIDATION_BATCHES, math.ceil(batches.num_windows / settings.batch_size))
    shares = [pipe.eval_step(*share_of_batch(pipe, batches.batch(index))) for index in range(num_batches)]
    known = [float(share) * settings.accumulate for share in shares if share is not None]
    return fmean(known) if context.rank == settings.reporter else None


def sample(pipe: Pipeline, settings: TrainSettings) -> tuple[bytes, ...]:
    """What the model writes after the prompts of the settings, if there are any."""
    return continue_prompts(
        pipe,
        pipe.context,
        [prompt.encode("utf-8", "surrogateescape") for prompt in settings.sample],
        settings.sample_bytes,
        sequence=settings.sequence,
        temperature=settings.temperature,
        seed=settings.seed,
    )


def metrics_of(pipe: Pipeline, settings: TrainSettings, step: int, loss: float, seconds: float) -> StepMetrics:
    """What there is to say of a step."""
    return StepMetrics(step + 1, loss, settings.tokens_per_step / seconds, seconds, pipe.grad_norm)


def measured_steps(num_steps: int, *, synchronous: bool) -> range:
    """The steps whose timeline is taken: the last ten, but never the very first if there are others.

    Where one step leads over to the next it is every fourth of them, for when it is taken all ranks wait for each
    other, and need a step or two to find their rhythm again.
    """
    last = num_steps - 1
    first = min(max(num_steps - NUM_MEASURED_STEPS, 1), last)
    return range(last, first - 1, -1 if synchronous else -4)


def measure(pipe: Pipeline, seconds: float) -> MeasuredStep:
    """The step just made, as it was on all ranks of the pipeline; all of them call this alike."""
    of_ranks = pipe.context.transport.gather(struct.pack("<d", seconds))
    return MeasuredStep(pipe.trace(), tuple(struct.unpack("<d", data)[0] for data in of_ranks))


def record(pipe: Pipeline, settings: TrainSettings) -> Recording:
    """The last steps as they were on all ranks, with what they cost; all of them call this alike."""
    return Recording.of(settings.schedule.name, pipe.calibrate(), pipe.timelines())


def learning_rate(step: int, settings: TrainSettings) -> float:
    """A straight warmup, then half a cosine down to a tenth."""
    num_warmup = min(NUM_WARMUP_STEPS, max(settings.steps // 10, 1))
    if step < num_warmup:
        return settings.lr * (step + 1) / num_warmup
    progress = (step - num_warmup) / max(settings.steps - num_warmup, 1)
    return settings.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


def set_learning_rate(optimizer: torch.optim.Optimizer | None, lr: float) -> None:
    """Let the update that this step's batch makes, now or later, use this rate."""
    assert optimizer is not None, "every stage has parameters"
    for group in optimizer.param_groups:
        group["lr"] = lr


def share_of_batch(pipe: Pipeline, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The sequences of a batch that are those of this rank's replica, where it computes."""
    x, y = (whole.tensor_split(pipe.num_replicas)[pipe.replica].to(pipe.context.device) for whole in batch)
    return x, y
