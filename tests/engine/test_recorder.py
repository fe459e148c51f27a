"""Recorders: moments on a GPU are events, resolved after the step; here a double of them, with a clock of its own."""

from dataclasses import dataclass, field
from time import perf_counter

import pytest
import torch
from launching import launch_on
from torch import nn

from stagewright.engine import Pipeline, RankContext
from stagewright.engine import executor as executor_module
from stagewright.engine.timing import trace as trace_module
from stagewright.engine.timing.recorder import EventRecorder, HostRecorder, Recorder, recorder_of
from stagewright.schedules import Timeline

GPU = torch.device("cuda", 0)


@dataclass
class Cuda:
    """A GPU on which everything queued takes a second, and is done only when the host waits for it."""

    queued: int = 0
    num_waits: int = 0
    streams: list[object] = field(default_factory=list)

    def current_stream(self, device: torch.device) -> str:
        return f"stream of {device}"

    def Event(self, *, enable_timing: bool) -> "Event":  # noqa: N802  # as torch calls it
        assert enable_timing
        return Event(self)


@dataclass
class Event:
    """Is recorded at a second of its GPU."""

    cuda: Cuda
    second: int | None = None
    done: bool = False

    def record(self, stream: str) -> None:
        self.cuda.streams.append(stream)
        self.cuda.queued += 1
        self.second = self.cuda.queued

    def synchronize(self) -> None:
        self.cuda.num_waits += 1
        self.done = True

    def elapsed_time(self, other: "Event") -> float:
        assert self.second is not None
        assert other.second is not None
        return 1e3 * (other.second - self.second)


def test_a_cpu_is_timed_by_the_clock_of_its_host() -> None:
    recorder = recorder_of(torch.device("cpu"))
    assert isinstance(recorder, HostRecorder)
    assert recorder.mark is perf_counter
    assert recorder.seconds([1.5, 2.5]) == [1.5, 2.5]


def test_a_gpu_is_timed_by_events() -> None:
    assert isinstance(recorder_of(GPU), EventRecorder)


def test_the_host_waits_for_no_event_but_once_when_they_are_resolved() -> None:
    cuda = Cuda()
    recorder = EventRecorder(GPU, cuda)
    moments = [recorder.mark() for _ in range(6)]
    assert cuda.num_waits == 0
    recorder.seconds(moments)
    assert cuda.num_waits == 1
    assert set(cuda.streams) == {"stream of cuda:0"}


def test_events_are_as_far_apart_as_the_gpu_says_and_before_now() -> None:
    recorder = EventRecorder(GPU, Cuda())
    moments = [recorder.mark() for _ in range(4)]
    before = perf_counter()
    seconds = recorder.seconds(moments)
    after = perf_counter()
    assert [later - seconds[0] for later in seconds] == pytest.approx([0, 1, 2, 3])
    assert before <= seconds[-1] + 1 <= after  # the event that places them came a second after the last


def test_nothing_has_no_times() -> None:
    cuda = Cuda()
    assert EventRecorder(GPU, cuda).seconds([]) == []
    assert cuda.num_waits == 0


def train(context: RankContext) -> Timeline:
    with Pipeline(
        lambda stage: nn.Linear(2, 2),
        schedule="1f1b",
        num_microbatches=3,
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        transport=context.transport,
    ) as pipe:
        pipe.train_step(torch.ones(3, 2), torch.ones(3, 2))
        return pipe.trace()


def test_a_step_is_recorded_by_events_where_the_device_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank on a GPU of its own: within the step no host waits, and each instruction lies between two events."""
    of_ranks: list[Cuda] = []

    def recorder(device: torch.device) -> Recorder:
        of_ranks.append(Cuda())
        return EventRecorder(GPU, of_ranks[-1])

    monkeypatch.setattr(executor_module, "recorder_of", recorder)
    monkeypatch.setattr(trace_module, "recorder_of", lambda device: EventRecorder(GPU, SHARED))
    timelines = launch_on("threads", train, 2)
    assert [cuda.num_waits for cuda in of_ranks if cuda.queued] == [0, 0]
    timeline = timelines[0]
    for events in timeline.events:
        assert all(event.end - event.start >= 1 - 1e-6 for event in events)


SHARED = Cuda()
