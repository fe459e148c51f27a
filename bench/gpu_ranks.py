"""GPU ranks: what each rank of the bench of GPUs does: a GPT trained alone, beside a plain loop, or with others."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from os import _exit
from statistics import median
from time import perf_counter
from typing import Final

from torch import Tensor, nn

from stagewright.bench.gpu_device import Device, Waits, device_of
from stagewright.bench.gpu_work import Kept, PlainLoop, Work, adam, kept_by
from stagewright.bench.memory import splits_backward
from stagewright.bench.paired import Turn, take_turns
from stagewright.engine import Pipeline, RankContext
from stagewright.engine.transport.contract import Transport
from stagewright.engine.transport.gloo import GlooTransport
from stagewright.models import token_loss
from stagewright.schedules import Schedule, simulate

# Steps in which buffers are made.
_NUM_DROPPED: Final = 3


@dataclass(frozen=True)
class Alone:
    """What the only rank has noted of a pipeline, and of the plain loop beside it.

    Args:
        model: name of the GPT.
        schedule: of the stages, all of which are on this rank.
        num_instructions: of a step.
        queued, plain_queued: seconds of each step until the host is through with it.
        done, plain_done: until the device is, too.
        most, plain_most: bytes that a step takes beyond what is allocated before it, at most.
        predicted: seconds of a step by the simulation of the costs that were traced.
        loss, plain_loss: of the last step.
    """

    model: str
    schedule: str
    num_instructions: int
    queued: Sequence[float]
    plain_queued: Sequence[float]
    done: Sequence[float]
    plain_done: Sequence[float]
    most: int
    plain_most: int
    predicted: float
    loss: float | None
    plain_loss: float | None

    @property
    def own(self) -> float:
        """Seconds of the host per instruction that the plain loop does not take, by the medians."""
        return (median(self.queued) - median(self.plain_queued)) / self.num_instructions


@dataclass(frozen=True)
class Shared:
    """What one of several ranks has noted.

    Args:
        turns: of some steps each.
        resting: bytes allocated between steps: weights, optimizer.
        most: bytes that a step takes beyond these, at most.
        kept: by stage.
        loss: of the last step; None where this rank does not see it.
    """

    turns: Sequence[Turn]
    resting: int
    most: int
    kept: Mapping[int, Kept]
    loss: float | None


def beside_plain(context: RankContext, model: str, work: Work, schedule: Schedule, seconds: float) -> Alone:
    """The only rank: train by a pipeline and by a plain loop, by turns.

    Args:
        context: this rank.
        model: what the GPT is called.
        work: it.
        schedule: on one rank.
        seconds: after which this ends, done or not.
    """
    with ended_after(seconds):
        device = device_of(work.device)
        x, y = work.batch(device.device)
        pipe = pipeline_of(work, schedule, device, transport_of(context, device))
        loop = PlainLoop(work.stage(0, 1, device.device), work.num_microbatches)
        ours, plain = Watched(partial(pipe.train_step, x, y), device), Watched(partial(loop.step, x, y), device)
        num_steps = work.num_rounds * work.num_steps
        take_turns(context, {"ours": ours, "plain": plain}, num_steps)
        return Alone(
            model=model,
            schedule=schedule.name,
            num_instructions=len(pipe.program.streams[0]),
            queued=ours.queued[-num_steps:],
            plain_queued=plain.queued[-num_steps:],
            done=ours.done[-num_steps:],
            plain_done=plain.done[-num_steps:],
            most=ours.most,
            plain_most=plain.most,
            predicted=simulate(pipe.program, pipe.calibrate()).makespan,
            loss=ours.loss,
            plain_loss=plain.loss,
        )


def shared(context: RankContext, work: Work, schedule: Schedule, seconds: float) -> Shared:
    """One of several ranks on one device; arguments as above."""
    with ended_after(seconds):
        device = device_of(work.device)
        transport = transport_of(context, device)
        splits = splits_backward(schedule.program())
        kept: dict[int, Kept] = {}
        modules: dict[int, nn.Module] = {}
        for stage in schedule.placement.stages_of(context.rank):
            modules[stage] = work.stage(stage, schedule.num_stages, device.device)
            kept[stage] = kept_by(work, modules[stage], stage, schedule.num_stages, device, splits)
        pipe = pipeline_of(work, schedule, device, transport, modules)
        x, y = work.batch(device.device)
        pipe.train_step(x, y)
        pipe.flush()
        device.wait()
        resting = device.allocated
        steps = Watched(partial(pipe.train_step, x, y), device, work.num_steps)
        turns = take_turns(context, {"ours": steps}, work.num_rounds, num_dropped=1)["ours"]
        pipe.flush()
        return Shared(turns, resting, steps.peak - resting, kept, steps.loss)


def waits_of(context: RankContext, work: Work, schedule: Schedule, seconds: float) -> Waits:
    """One of any number of ranks: for what its host waits in a step; arguments as above."""
    with ended_after(seconds):
        device = device_of(work.device)
        pipe = pipeline_of(work, schedule, device, transport_of(context, device))
        step = partial(pipe.train_step, *work.batch(device.device))
        for _ in range(_NUM_DROPPED):
            step()
        places, calls = device.places_of_waits(step), device.calls_that_wait(step)
        first = device.first_wait(step) if context.num_ranks == 1 else None
        if first is None:
            pipe.flush()
        return Waits(places, calls, first)


def transport_of(context: RankContext, device: Device) -> Transport:
    """Over pinned host memory where ranks share a GPU."""
    return GlooTransport(device=device.device) if device.device.type == "cuda" else context.transport


def pipeline_of(
    work: Work,
    schedule: Schedule,
    device: Device,
    transport: Transport,
    modules: Mapping[int, nn.Module] | None = None,
) -> Pipeline:
    """The model by a schedule, of stages that are given or made."""
    made = {
        stage: modules[stage] if modules else work.stage(stage, schedule.num_stages, device.device)
        for stage in schedule.placement.stages_of(transport.rank)
    }
    return Pipeline(made, schedule=schedule, loss_fn=token_loss, optimizer=adam, transport=transport)


class Watched:
    """Steps, and then the wait until the device has done them; of each, averages over the steps are noted.

    Args:
        step: one; it may give its loss.
        device: where.
        num_steps: that follow each other.
    """

    def __init__(self, step: Callable[[], Tensor | None], device: Device, num_steps: int = 1) -> None:
        self._step = step
        self._device = device
        self._num_steps = num_steps
        self._loss: Tensor | None = None
        self.queued: list[float] = []
        self.done: list[float] = []
        self.peak = self.most = 0

    def __call__(self) -> None:
        """So many steps."""
        self._device.restart_peak()
        before = self._device.allocated
        start = perf_counter()
        for _ in range(self._num_steps):
            self._loss = self._step()
        self.queued.append((perf_counter() - start) / self._num_steps)
        self._device.wait()
        self.done.append((perf_counter() - start) / self._num_steps)
        peak = self._device.peak
        self.peak, self.most = max(self.peak, peak), max(self.most, peak - before)

    @property
    def loss(self) -> float | None:
        """Of the last step, where it is seen."""
        return None if self._loss is None else float(self._loss)


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End this process if the block takes longer: on a device that hangs nothing else would."""
    timer = threading.Timer(seconds, _exit, (1,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
