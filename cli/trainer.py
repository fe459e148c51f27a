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
from stagewright.cli.metrics import Listener, StepMetrics, TrainResult
from stagewright.cli.optimizer import make_optimizer
from stagewright.cli.sample import continue_prompts
from stagewright.cli.settings import TrainSettings
from stagewright.engine import Pipeline, RankContext
from stagewright.models import TIED_WEIGHTS, GPTConfig, build_gpt_stage, token_loss

NUM_MEASURED_STEPS: Final = 10
NUM_VALIDATION_BATCHES: Final = 16
NUM_WARMUP_STEPS: Final = 20


def train(context: RankContext, settings: TrainSettings, corpus: Corpus, listener: Listener) -> TrainResult | None:
    """Train, validate, and measure the bubble. Every rank calls this; `settings.reporter` gets the result."""
    batches = Batches(corpus.train, settings.sequence, settings.batch_size, settings.seed)
    history: list[StepMetrics] = []
    measured: list[MeasuredStep] = []
    with open_pipeline(context, settings) as pipe:
        for step in range(settings.steps):
            set_learning_rate(pipe.optimizer, learning_rate(step, settings))
            start = time.perf_counter()
            loss = update(pipe, context, settings, batches, step)
            seconds = time.perf_counter() - start
            if loss is not None:
                history.append(metrics_of(pipe, settings, step, loss, seconds))
                listener.step_done(history[-1])
            if step in measured_steps(settings.steps, synchronous=settings.schedule.synchronous):
                measured.append(measure(pipe, context, seconds))
        pipe.flush()
        validation_loss = validate(pipe, context, settings, corpus)
        continuations = sample(pipe, context, settings)
        loss_scale = pipe.loss_scale if settings.dtype == "float16" else None
    if validation_loss is None:
        return None

    later = history[1:] or history  # the first step also makes buffers
    result = TrainResult(
        first_loss=history[0].loss,
        last_loss=history[-1].loss,
        validation_loss=validation_loss,
        version=settings.version,
        unigram_bits=unigram_bits_per_byte(corpus.train, corpus.validation),
        tokens_per_second=settings.tokens_per_step / fmean(metrics.step_seconds for metrics in later),
        bubble=compare_bubble(settings.schedule, measured),
        loss_scale=loss_scale,
        continuations=continuations,
    )
    listener.run_done(result)
    return result


def open_pipeline(context: RankContext, settings: TrainSettings) -> Pipeline:
    """Build this rank's stages and what trains them."""
    schedule = settings.schedule
    dtype = getattr(torch, settings.dtype)
    build = partial(build_gpt_stage, gpt_config(settings), num_stages=schedule.num_stages, seed=settings.seed)
    return Pipeline(
        partial(build, dtype=dtype),
        schedule=schedule,
        num_microbatches=schedule.num_microbatches,
        loss_fn=partial(share_of_loss, num_batches=settings.accumulate),
        optimizer=partial(make_optimizer, settings.optimizer, settings.lr),
        transport=context.transport,
        seed=settings.seed,
        recompute=settings.recompute,
        tied=[TIED_WEIGHTS] if settings.ties_stages else [],
        max_norm=settings.clip,
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


def update(pipe: Pipeline, context: RankContext, settings: TrainSettings, batches: Batches, step: int) -> float | None:
    """Make one update of one batch or several, and return their mean loss where the last stage lives.

    Gradients of all but the last batch wait in `.grad`, where those of the last one join them before the update.
    """
    first = step * settings.accumulate
    last = first + settings.accumulate - 1
    shares = [pipe.forward_backward(*on(context.device, batches.batch(index))) for index in range(first, last)]
    shares.append(pipe.train_step(*on(context.device, batches.batch(last))))
    known = [float(share) for share in shares if share is not None]
    return sum(known) if known else None


def validate(pipe: Pipeline, context: RankContext, settings: TrainSettings, corpus: Corpus) -> float | None:
    """Mean loss over a fixed number of batches of the held-out text, the same ones in every run."""
    batches = Batches(corpus.validation, settings.sequence, settings.batch_size, seed=0)
    num_batches = min(NUM_VALIDATION_BATCHES, math.ceil(batches.num_windows / settings.batch_size))
    shares = [pipe.eval_step(*on(context.device, batches.batch(index))) for index in range(num_batches)]
    known = [float(share) * settings.accumulate for share in shares if share is not None]
    return fmean(known) if context.rank == settings.reporter else None


def sample(pipe: Pipeline, context: RankContext, settings: TrainSettings) -> tuple[bytes, ...]:
    """What the model writes after the prompts of the settings, if there are any."""
    return continue_prompts(
        pipe,
        context,
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


def measure(pipe: Pipeline, context: RankContext, seconds: float) -> MeasuredStep:
    """The step just made, as it was on all ranks; all of them call this alike."""
    of_ranks = context.transport.gather(struct.pack("<d", seconds))
    return MeasuredStep(pipe.trace(), tuple(struct.unpack("<d", data)[0] for data in of_ranks))


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


def on(device: torch.device, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A batch where its rank computes."""
    return batch[0].to(device), batch[1].to(device)
