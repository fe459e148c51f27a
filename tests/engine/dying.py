"""Ranks that die at a given instruction, in every way, and what all others see of it; for processes to import."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeAlias

import torch
from plain import make_batch, make_stage, momentum, squared_error
from torch import Tensor, nn

from stagewright.engine import Checkpoints, PeerError, Pipeline, RankContext, from_environment, make_mesh
from stagewright.engine.checkpoint.files import Files
from stagewright.engine.launch.context import tell_end
from stagewright.engine.transport.contract import Transport
from stagewright.engine.transport.gloo import GlooTransport
from stagewright.schedules import create

How: TypeAlias = Literal["raise", "memory", "exit", "kill", "stop"]
STEP: Final = 1  # in which it dies
RANK: Final = 1
MICROBATCHES: Final = 5
# What rank 1 does in 1F1B with 5 microbatches; on 3 ranks it warms up with one, on 4 with two.
PLACES: Final = {
    "warmup": "1F0",
    "steady": "1B1",
    "cooldown": "1B4",
    "sending": "1SEND_F2",
    "agreement": "SYNC_SCALARS",
    "optimizer": "1STEP@1",
}
CHECKPOINT: Final = "checkpoint"
REDUCTION: Final = "1REDUCE_GRAD"


@dataclass(frozen=True)
class Death:
    """How and where a rank dies.

    Args:
        how: raise an error; run out of memory; end without a word; be killed; be stopped, and answer no more.
        where: the instruction of step 1, or ``checkpoint``.
        timeout: of the pipeline, in seconds.
        dp: replicas of the pipeline; it dies in the first.
        shares_memory: whether ranks exchange data in memory, as on one host, or over gloo, as from host to host.
    """

    how: How
    where: str
    timeout: float = 8.0
    dp: int = 1
    shares_memory: bool = True


def die(how: How) -> None:
    """Do it."""
    match how:
        case "raise":
            raise ValueError("boom")
        case "memory":
            raise torch.OutOfMemoryError("no memory is left for boom")
        case "exit":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


class MortalFiles(Files):
    """A disk on which the first thing that is to be written ends the rank."""

    def __init__(self, how: How) -> None:
        self.how = how

    def sync(self, file: IO[bytes]) -> None:
        """Never comes to that."""
        die(self.how)


def plant(pipe: Pipeline, token: str, how: How) -> None:
    """Let the rank die where it would run that instruction of its program, as soon as it gets there."""
    (executor,) = pipe._training._executors.values()
    tokens = [str(instruction) for instruction in executor._stream]
    actions: list[Callable[[], None]] = list(executor._actions)
    actions[tokens.index(token)] = partial(die, how)
    executor._actions = tuple(actions)


def train_and_die(context: RankContext, death: Death, folder: str) -> None:
    """Train, and write down the error that ends this rank, where one does; a file a rank."""
    torch.set_num_threads(1)
    rank = context.rank
    Path(folder, f"process {rank}").write_text(str(os.getpid()))
    try:
        _train(context, death, folder)
    except BaseException as error:
        Path(folder, f"rank {rank}").write_text(f"{type(error).__name__}: {error}")
        raise


def _train(context: RankContext, death: Death, folder: str) -> None:
    pp = context.num_ranks // death.dp
    where: dict[str, Any] = {
        "transport": context.transport if death.shares_memory else GlooTransport(shares_memory=False)
    }
    if death.dp > 1:
        where = {"mesh": make_mesh(pp=pp, dp=death.dp, context=context)}
    with Pipeline(
        make_stage,
        schedule=create("1f1b", num_ranks=pp, num_microbatches=MICROBATCHES),
        loss_fn=squared_error,
        optimizer=momentum,
        max_norm=100.0,
        timeout=death.timeout,
        **where,
    ) as pipe:
        dies = pipe.rank == RANK and pipe.replica == 0
        for step in range(STEP + 20):
            if step == STEP and dies and death.where != CHECKPOINT:
                plant(pipe, death.where, death.how)
            pipe.train_step(*make_batch(2 * MICROBATCHES, step))
            if step == STEP and death.where == CHECKPOINT:
                files = MortalFiles(death.how) if dies else Files()
                Checkpoints(Path(folder, "checkpoints"), pipe, files=files).save()


def main(death: Death, folder: str) -> None:
    """As one of the ranks that a launcher has started."""
    with from_environment() as context:
        train_and_die(context, death, folder)


# What users bring


class Uneven(nn.Module):
    """A stage whose output is not what the next one takes, in one microbatch: of another width, or type."""

    def __init__(self, stage: int, fault: str) -> None:
        super().__init__()
        self.block, self.fault, self.num_forwards = make_stage(stage), fault, 0

    def forward(self, x: Tensor) -> Tensor:
        """Wrong in the third microbatch of the step."""
        self.num_forwards += 1
        y: Tensor = self.block(x)
        if self.num_forwards != MICROBATCHES * STEP + 3:
            return y
        return y[:, :-1] if self.fault == "shape" else y.float()


def fail_by_hand(context: RankContext, fault: str) -> str:
    """What a rank sees where what a user has brought fails on one of them: a loss, a loader, a boundary."""
    torch.set_num_threads(1)
    last = context.num_ranks - 1
    fails = context.rank == (last if fault == "loss" else 0 if fault == "loader" else RANK)
    stage = partial(Uneven, fault=fault) if fails and fault in ("shape", "dtype") else make_stage
    loss = BreakingLoss() if fault == "loss" else squared_error
    options: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": MICROBATCHES, "optimizer": momentum}
    try:
        with Pipeline(stage, loss_fn=loss, transport=context.transport, **options) as pipe:
            for step in range(STEP + 20):
                pipe.train_step(*load(step, fails=fails and fault == "loader"))
    except Exception as error:
        tell_end(context.transport, error)  # as the launcher does
        return f"{type(error).__name__}: {error}"
    return "nothing"


class BreakingLoss:
    """Raises for the third microbatch of the step."""

    num_calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == MICROBATCHES * STEP + 3:
            raise ArithmeticError("boom in loss")
        return squared_error(output, target)


def load(step: int, *, fails: bool) -> tuple[Tensor, Tensor]:
    """A data loader."""
    if fails and step == STEP:
        raise OSError(5, "boom in loader")
    return make_batch(2 * MICROBATCHES, step)


class Stuck(nn.Module):
    """A stage that does not come back, until the test is over."""

    def __init__(self, stage: int, is_over: threading.Event, transport: Transport) -> None:
        super().__init__()
        self.block, self.is_over, self.transport, self.num_forwards = make_stage(stage), is_over, transport, 0

    def forward(self, x: Tensor) -> Tensor:
        """Sleeps in the third microbatch of the step."""
        self.num_forwards += 1
        if self.num_forwards == MICROBATCHES * STEP + 3:
            self.transport.set_timeout(1.0)
            self.is_over.wait(60)
        return self.block(x)  # type: ignore[no-any-return]


def get_stuck(context: RankContext, is_over: threading.Event, said: dict[int, str]) -> None:
    """One thread rank stops answering."""
    stage = partial(Stuck, is_over=is_over, transport=context.transport) if context.rank == RANK else make_stage
    options: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": MICROBATCHES, "optimizer": momentum}
    try:
        with Pipeline(stage, loss_fn=squared_error, transport=context.transport, **options) as pipe:
            for step in range(STEP + 20):
                pipe.train_step(*make_batch(2 * MICROBATCHES, step))
    except PeerError as error:
        said[context.rank] = str(error)
        raise
