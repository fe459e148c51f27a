"""GPU parts: what the bench of GPUs measures, on which GPTs, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from stagewright.bench.gpu_work import Work
from stagewright.models import GPTConfig
from stagewright.schedules import Schedule, ScheduleError, create, find, names

Kind: TypeAlias = Literal["alone", "waits", "shared"]

# The schedules that say most come first, and all others after them.
_FIRST: Final = (
    "1f1b",
    "gpipe",
    "interleaved",
    "zb-h1",
    "zbv",
    "2bw",
    "dualpipev",
    "v-half",
    "bfs",
    "zb-h2",
    "chimera",
)
_SAME: Final = ("none", "zb-1p", "zb-2p")  # like others of them, with other options


@dataclass(frozen=True)
class Part:
    """What is measured in processes of its own, so that one that fails takes no other along.

    Args:
        kind: beside a plain loop, what waits, or ranks that share the device.
        model: which GPT.
        schedule: with its number of ranks.
    """

    kind: Kind
    model: str
    schedule: Schedule

    def __str__(self) -> str:
        return f"{self.kind} {self.model} {self.schedule.name} P={self.schedule.num_ranks}"


def works_on(device: str, num_microbatches: int) -> dict[str, Work]:
    """The GPTs by name: on a GPU the large one has 369 million weights, on a CPU it is as tiny as the other."""
    tiny = GPTConfig(vocab_size=256, num_layers=8, hidden_size=64, num_heads=2, sequence_length=32)
    if device == "cpu":
        tried = Work(tiny, 1, num_microbatches, device, num_rounds=3, num_steps=1)
        return {"tiny": tried, "large": tried}
    large = GPTConfig(vocab_size=32768, num_layers=24, hidden_size=1024, num_heads=16, sequence_length=1024)
    return {
        "tiny": Work(tiny, 1, num_microbatches, device, num_rounds=10, num_steps=5),
        "large": Work(large, 2, num_microbatches, device, num_rounds=7, num_steps=3),
    }


def parts_of(num_ranks: int, num_microbatches: int, only: Sequence[str] | None = None) -> list[Part]:
    """All parts, the most important ones first."""
    together = [*dict.fromkeys(only or [*_FIRST, *(name for name in names() if name not in _SAME)])]
    on_one = {name: create(name, num_ranks=1, num_microbatches=num_microbatches) for name in ("1f1b", "zb-h1", "bfs")}
    on_all = [
        Part("shared", "large", schedule)
        for schedule in schedules_of(together, num_ranks, num_microbatches, strict=only is not None)
    ]
    return [
        Part("alone", "tiny", on_one["1f1b"]),
        Part("waits", "tiny", on_one["1f1b"]),
        Part("alone", "large", on_one["1f1b"]),
        *on_all[:2],
        Part("waits", "tiny", create("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)),
        *on_all[2:5],
        Part("alone", "tiny", on_one["zb-h1"]),
        Part("alone", "tiny", on_one["bfs"]),
        *on_all[5:],
    ]


def schedules_of(given: Sequence[str], num_ranks: int, num_microbatches: int, *, strict: bool) -> list[Schedule]:
    """Those that the engine runs in this shape.

    Raises:
        ScheduleError: one cannot serve it, where that is strict.
    """
    made = []
    for name in given:
        try:
            if find(name).runnable:
                made.append(create(name, num_ranks=num_ranks, num_microbatches=num_microbatches))
        except ScheduleError:
            if strict:
                raise
    return made
