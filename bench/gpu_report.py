"""GPU report: what the bench of GPUs has found, as tables."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from stagewright.bench.gpu_device import Waits
from stagewright.bench.gpu_ranks import Alone, Shared
from stagewright.bench.gpu_work import Kept, Work
from stagewright.bench.memory import splits_backward
from stagewright.bench.overhead import MOST_OF_PLAIN
from stagewright.bench.paired import Ratio, together
from stagewright.bench.prediction import interval
from stagewright.bench.report import Section, marked
from stagewright.schedules import Costs, Program, Schedule, simulate
from stagewright.schedules.instructions import SendActivation, SendGradient

# How far apart the losses of schedules may be that make the same updates, in bf16, as a share.
MOST_APART = 0.01


@dataclass(frozen=True)
class Outcome:
    """Ranks that shared a device.

    Args:
        schedule: by which they trained.
        num_steps: of each turn.
        of_ranks: what each has noted.
    """

    schedule: Schedule
    num_steps: int
    of_ranks: Sequence[Shared]

    @property
    def steps(self) -> list[float]:
        """Seconds of a step, the average of each turn."""
        rounds = together([{"ours": of_rank.turns} for of_rank in self.of_ranks])["ours"]
        return [turn.wall / self.num_steps for turn in rounds]

    @property
    def loss(self) -> float:
        """Of the last step."""
        return next(of_rank.loss for of_rank in self.of_ranks if of_rank.loss is not None)

    @property
    def predicted(self) -> list[float] | None:
        """Bytes that a step takes at most on each rank; None without a flush, where some are in flight before it."""
        kept = {stage: kept for of_rank in self.of_ranks for stage, kept in of_rank.kept.items()}
        return predicted_bytes(self.schedule.program(), kept) if self.schedule.synchronous else None


def predicted_bytes(program: Program, kept: Mapping[int, Kept]) -> list[float]:
    """What a synchronous step takes at most on each rank: stash, gradients, and the most room that a stage works in."""
    of_stages = [kept[stage] for stage in range(program.num_stages)]
    split = splits_backward(program)
    costs = Costs(
        activation_bytes=[float(max(of.activation, 0)) for of in of_stages],
        weight_bytes=[float(max(of.weight, 0)) if split else 0.0 for of in of_stages],
    )
    peaks = simulate(program, costs).peak_bytes
    placed = [[kept[stage] for stage in program.placement.stages_of(rank)] for rank in range(program.num_ranks)]
    return [
        peak + sum(of.gradients for of in own) + max(of.workspace for of in own) for peak, own in zip(peaks, placed)
    ]


@dataclass(frozen=True)
class Look:
    """For what the hosts of some ranks waited in a step.

    Args:
        program: that they ran.
        of_ranks: each of them.
    """

    schedule: Schedule
    of_ranks: Sequence[Waits]

    @property
    def num_sends(self) -> int:
        """Messages of a step."""
        streams = self.schedule.program().streams
        return sum(isinstance(one, SendActivation | SendGradient) for stream in streams for one in stream)

    @property
    def places(self) -> Counter[str]:
        """Of all ranks."""
        return sum((Counter(waits.places) for waits in self.of_ranks), Counter())

    @property
    def calls(self) -> Counter[str] | None:
        """Of all ranks; None where one does not see them."""
        seen = [waits.calls for waits in self.of_ranks]
        return None if None in seen else sum((Counter(calls) for calls in seen), Counter())

    @property
    def first(self) -> str | None:
        """Where a step ended in which waiting is an error."""
        return next((waits.first for waits in self.of_ranks if waits.first is not None), None)


@dataclass
class Found:
    """All that was measured, and what was not.

    Args:
        alone, looks, shared: by the kind of part.
        failures: part -> error.
        left: parts for which there was no time.
    """

    alone: list[Alone] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    shared: list[Outcome] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def sections_of(found: Found, works: Mapping[str, Work], device: str) -> list[Section]:
    """A table for each kind of part."""
    return [alone_section(found.alone, works), look_section(found.looks), shared_section(found, works["large"], device)]


def described(work: Work) -> str:
    """A GPT in some words."""
    config = work.config
    dtype, shape = str(work.dtype).removeprefix("torch."), f"{config.num_layers} layers, hidden {config.hidden_size}"
    tokens = f"M={work.num_microbatches} of {work.rows} x {config.sequence_length} tokens"
    return f"{work.num_parameters / 1e6:.3g} M weights in {dtype} ({shape}), {tokens}"


def alone_section(alone: Sequence[Alone], works: Mapping[str, Work]) -> Section:
    """One rank beside a plain loop."""
    return Section(
        name="gpu-alone",
        title="one rank, beside a plain loop: "
        + "; ".join(f"{name}: {described(work)}" for name, work in works.items()),
        columns=(
            *("GPT", "schedule", "instructions", "queued, ms", "of the loop", "engine's own, µs an instruction"),
            *("done, ms", "of the loop", "ratio [95 %]", "predicted, ms", "MiB", "of the loop", "loss", "of the loop"),
        ),
        rows=tuple(map(_row_alone, alone)),
        note="Medians of steps by turns in one process. Queued: until the host is through with a step, done: until the "
        "GPU is. The engine's own is what the host takes longer than the loop, by instruction. Predicted by the "
        "simulation of what events on the GPU have timed; MiB beyond what lies there between steps. Bar for the large "
        f"GPT by 1f1b: at most {MOST_OF_PLAIN:g} of the loop.",
    )


def _row_alone(alone: Alone) -> tuple[str, ...]:
    ratio = Ratio.of(alone.done, alone.plain_done)
    has_bar = (alone.model, alone.schedule) == ("large", "1f1b")
    return (
        alone.model,
        alone.schedule,
        str(alone.num_instructions),
        f"{1e3 * median(alone.queued):.2f}",
        f"{1e3 * median(alone.plain_queued):.2f}",
        f"{1e6 * alone.own:.1f}",
        f"{1e3 * median(alone.done):.2f}",
        f"{1e3 * median(alone.plain_done):.2f}",
        marked(str(ratio), not has_bar or ratio.median <= MOST_OF_PLAIN),
        f"{1e3 * alone.predicted:.2f}",
        f"{alone.most / 2**20:.0f}",
        f"{alone.plain_most / 2**20:.0f}",
        "" if alone.loss is None else f"{alone.loss:.4f}",
        "" if alone.plain_loss is None else f"{alone.plain_loss:.4f}",
    )


def look_section(looks: Sequence[Look]) -> Section:
    """For what hosts wait."""
    return Section(
        name="gpu-waits",
        title="for what the hosts wait in a step",
        columns=("schedule", "ranks", "messages", "waits", "where", "calls of the CUDA runtime that wait"),
        rows=tuple(map(_row_look, looks)),
        note="Waits as torch's debug mode sees them, which does not see all, and calls of the runtime as the profiler "
        "does, on all ranks together. Bar: a single rank waits for nothing; ranks that share a GPU must wait until a "
        "message is in the memory of the host.",
    )


def _row_look(look: Look) -> tuple[str, ...]:
    places, calls, num_ranks = look.places, look.calls, look.schedule.num_ranks
    never = not places and look.first is None
    where = ", ".join(f"{count} x {place}" for place, count in places.most_common()) or look.first or "nowhere"
    told = "not seen" if calls is None else ", ".join(f"{n} x {name}" for name, n in calls.most_common()) or "none"
    return (
        look.schedule.name,
        str(num_ranks),
        str(look.num_sends),
        marked(str(sum(places.values()) or int(look.first is not None)), num_ranks > 1 or never),
        where,
        marked(told, num_ranks > 1 or not calls),
    )


def shared_section(found: Found, work: Work, device: str) -> Section:
    """Schedules on ranks that share a device."""
    base = next((one for one in found.alone if (one.model, one.schedule) == ("large", "1f1b")), None)
    expected = next((outcome.loss for outcome in found.shared if outcome.schedule.synchronous), None)
    num_ranks = max((outcome.schedule.num_ranks for outcome in found.shared), default=0)
    told = [f"{part}: {error}" for part, error in found.failures.items()]
    told += [f"no time was left for {', '.join(found.left)}"] if found.left else []
    return Section(
        name="gpu",
        title=f"schedules on {num_ranks} ranks that share one {device}: {described(work)}",
        columns=(
            *("schedule", "stages", "step, ms [95 %]", "of one rank", "tokens/s"),
            *("stash", "MiB by rank", "predicted", "resting MiB", "loss"),
        ),
        rows=tuple(_row_shared(outcome, work, base, expected) for outcome in found.shared),
        note="Ranks compute by turns on one GPU, so a step shows their work and messages through the host, never the "
        "bubble; of one rank: how many times as long as 1f1b on one rank. Stash: entries predicted, by rank. MiB: the "
        "most that a step takes beyond what rests between steps; predicted from what one microbatch takes on each "
        f"stage outside any pipeline. Bar: losses of schedules with a flush within {MOST_APART:.0%} of each other."
        + "".join(f" {line}." for line in told),
        bars={outcome.schedule.name: {"step": 1e3 * median(outcome.steps)} for outcome in found.shared},
        unit=" ms",
    )


def _row_shared(outcome: Outcome, work: Work, base: Alone | None, expected: float | None) -> tuple[str, ...]:
    schedule, step = outcome.schedule, median(outcome.steps)
    low, high = interval(outcome.steps)
    agrees = not schedule.synchronous or expected is None or abs(outcome.loss / expected - 1) <= MOST_APART
    return (
        schedule.name,
        str(schedule.num_stages),
        f"{1e3 * step:.1f} [{1e3 * low:.1f} .. {1e3 * high:.1f}]",
        "" if base is None else f"{step / median(base.done):.2f}",
        f"{work.num_tokens / step:.0f}",
        " ".join(map(str, simulate(schedule.program()).peak_stash)),
        _mebibytes([of_rank.most for of_rank in outcome.of_ranks]),
        _mebibytes(outcome.predicted or []),
        _mebibytes([of_rank.resting for of_rank in outcome.of_ranks]),
        marked(f"{outcome.loss:.4f}", agrees),
    )


def _mebibytes(sizes: Sequence[float]) -> str:
    return " ".join(f"{size / 2**20:.0f}" for size in sizes)
