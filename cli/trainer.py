"""A GPT trained over a pipeline: what a trainer that embeds stagewright looks like.

`train` runs in every rank. It knows nothing of terminals and files: what happens is told to a listener.
"""

import math
import time
from functools import partial
from statistics import fmean

import torch

from stagewright.cli.batches import Batches
from stagewright.cli.bubble import compare_bubble
from stagewright.cli.corpus import Corpus, unigram_bits_per_byte
from stagewright.cli.metrics import Listener, StepMetrics, TrainResult
from stagewright.cli.sample import continue_prompts
from stagewright.cli.settings import TrainSettings
from stagewright.engine import Pipeline, RankContext
from stagewright.models import GPTConfig, build_gpt_stage, token_loss

NUM_MEASURED_STEPS = 10
NUM_VALIDATION_BATCHES = 16
NUM_WARMUP_STEPS = 20


def train(context: RankContext, settings: TrainSettings, corpus: Corpus, listener: Listener) -> TrainResult:
    """Train, validate, and measure the bubble. Every rank calls this, and gets the same result."""
    schedule = settings.schedule
    batches = Batches(corpus.train, settings.sequence, settings.batch_size, settings.seed)
    pipe = Pipeline(
        partial(build_gpt_stage, gpt_config(settings), num_stages=schedule.num_stages, seed=settings.seed),
        schedule=schedule,
        num_microbatches=schedule.num_microbatches,
        loss_fn=token_loss,
        optimizer=partial(torch.optim.AdamW, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1),
        transport=context.transport,
        seed=settings.seed,
        share_loss=True,
    )
    with pipe:
        history, timelines = [], []
        for step in range(settings.steps):
            set_learning_rate(pipe.optimizer, learning_rate(step, settings))
            start = time.perf_counter()
            loss = shared(pipe.train_step(*batches.batch(step)))
            seconds = time.perf_counter() - start
            history.append(StepMetrics(step + 1, loss, settings.tokens_per_step / seconds, seconds))
            listener.step_done(history[-1])
            if step >= first_measured_step(settings.steps):
                timelines.append(pipe.trace())

        later = history[1:] or history  # the first step also makes buffers
        result = TrainResult(
            first_loss=history[0].loss,
            last_loss=history[-1].loss,
            validation_loss=validate(pipe, settings, corpus),
            unigram_bits=unigram_bits_per_byte(corpus.train, corpus.validation),
            tokens_per_second=settings.tokens_per_step / fmean(metrics.step_seconds for metrics in later),
            bubble=compare_bubble(schedule, timelines),
            continuations=sample(pipe, context, settings),
        )
    listener.run_done(result)
    return result


def gpt_config(settings: TrainSettings) -> GPTConfig:
    """The shape of the model that the settings ask for. Raises ValueError for sizes that do not fit together."""
    return GPTConfig(
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        num_heads=settings.heads,
        sequence_length=settings.sequence,
        dropout=settings.dropout,
    )


def validate(pipe: Pipeline, settings: TrainSettings, corpus: Corpus) -> float:
    """Mean loss over a fixed number of batches of the held-out text, the same ones in every run."""
    batches = Batches(corpus.validation, settings.sequence, settings.batch_size, seed=0)
    num_batches = min(NUM_VALIDATION_BATCHES, math.ceil(batches.num_windows / settings.batch_size))
    return fmean(shared(pipe.eval_step(*batches.batch(step))) for step in range(num_batches))


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


def first_measured_step(num_steps: int) -> int:
    """The step from which on the timeline is taken: the last ten, but never the very first if there are others."""
    return min(max(num_steps - NUM_MEASURED_STEPS, 1), num_steps - 1)


def learning_rate(step: int, settings: TrainSettings) -> float:
    """A straight warmup, then half a cosine down to a tenth."""
    num_warmup = min(NUM_WARMUP_STEPS, max(settings.steps // 10, 1))
    if step < num_warmup:
        return settings.lr * (step + 1) / num_warmup
    progress = (step - num_warmup) / max(settings.steps - num_warmup, 1)
    return settings.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


def set_learning_rate(optimizer: torch.optim.Optimizer | None, lr: float) -> None:
    """Let the next update use this rate."""
    assert optimizer is not None, "every stage has parameters"
    for group in optimizer.param_groups:
        group["lr"] = lr


def shared(loss: torch.Tensor | None) -> float:
    """The loss as a number."""
    assert loss is not None, "share_loss gives it to every rank"
    return float(loss)
