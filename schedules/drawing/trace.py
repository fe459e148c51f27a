"""Trace: a timeline for Perfetto (ui.perfetto.dev) and chrome://tracing, in the Trace Event Format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stagewright.schedules.drawing.caption import caption_of, memory_unit
from stagewright.schedules.drawing.cells import why
from stagewright.schedules.instructions import (
    Backward,
    Forward,
    InputGradient,
    Instruction,
    Overlap,
    ReceiveActivation,
    ReceiveGradient,
    ReduceGradient,
    SendActivation,
    SendGradient,
)
from stagewright.schedules.placement import Placement
from stagewright.schedules.timeline import Event, Timeline

Record = dict[str, Any]

# Viewers keep process 0 and thread 0 for the idle one.
_FIRST_PROCESS: Final = 1000
_COMPUTE: Final = 1
_KINDS: Final = ("compute", "send", "receive", "reduce")
# Records of one moment, in the order in which a viewer must read them: a slice before its arrows.
_ORDER: Final = {"M": 0, "X": 1, "s": 2, "f": 3, "C": 4}


def trace_text(timeline: Timeline, *, title: str = "", microseconds: float = 1000.0) -> str:
    """Write a timeline as JSON in the Trace Event Format.

    Every rank is a process with a track for what it computes, tracks for what it sends, receives and reduces (several
    where these overlap), and a counter for what it stashes. An arrow leads from each send to the computation
    that needs its message. A receive lasts from its posting to the arrival.

    Args:
        timeline: what to write.
        title: kept with the trace.
        microseconds: what one unit of the timeline's time is shown as; a millisecond by default.
    """
    messages = _Messages.of(timeline)
    clock = _Clock(min((event.start for events in timeline.events for event in events), default=0.0), microseconds)
    records: list[Record] = []
    for rank, events in enumerate(timeline.events):
        tracks = _Tracks(rank)
        for event in events:
            records += _records_of(event, timeline.program.placement, tracks, messages, clock)
        records += tracks.names()
    records += _counters(timeline, clock)
    records.sort(key=_moment)
    head = {"displayTimeUnit": "ms", "otherData": {"title": title, "caption": " ".join(caption_of(timeline))}}
    lines = ",\n".join(map(json.JSONEncoder(separators=(",", ":")).encode, records))
    return f'{json.dumps(head)[:-1]}, "traceEvents": [\n{lines}\n]}}\n'


@dataclass(frozen=True)
class _Clock:
    """Turns the timeline's times into the trace's, to the nanosecond."""

    origin: float
    microseconds: float

    def shown(self, time: float) -> float:
        return round((time - self.origin) * self.microseconds, 3)


@dataclass(frozen=True)
class _Messages:
    """Of each send: when its message arrives, and the number of the arrow that shows it."""

    arrivals: Mapping[Instruction, float]
    arrows: Mapping[Instruction, int]

    @classmethod
    def of(cls, timeline: Timeline) -> "_Messages":
        arrivals: dict[Instruction, float] = {
            event.instruction: event.end
            for events in timeline.events
            for event in events
            if isinstance(event.instruction, SendActivation | SendGradient)
        }
        return cls(arrivals, {send: number for number, send in enumerate(arrivals, 1)})

    def arrival(self, send: Instruction, posted: Event) -> float:
        """When what a receive was posted for is there."""
        return max(self.arrivals.get(send, posted.end), posted.end)


class _Tracks:
    """The tracks of one rank: the first one computes, the others are opened as they are needed."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._kinds = ["compute"]
        self._ends = [0.0]

    def free(self, kind: str, start: float, end: float) -> int:
        """The first track of a kind on which nothing is going on any more, now taken until ``end``."""
        for index, until in enumerate(self._ends):
            if self._kinds[index] == kind and until <= start:
                self._ends[index] = end
                return _COMPUTE + index
        self._kinds.append(kind)
        self._ends.append(end)
        return _COMPUTE + len(self._kinds) - 1

    def names(self) -> list[Record]:
        """The records that name the rank and its tracks, and put them in order."""
        about = [_about(self.rank, _COMPUTE, "process", f"rank {self.rank}", self.rank)]
        for index, kind in enumerate(self._kinds):
            among = self._kinds[:index].count(kind)
            name = f"{kind} {among + 1}" if among else kind
            about.append(_about(self.rank, _COMPUTE + index, "thread", name, 100 * _KINDS.index(kind) + among))
        return [record for records in about for record in records]


def _about(rank: int, track: int, what: str, name: str, place: int) -> list[Record]:
    """The records that name a process or a thread and say where it stands."""
    where = {"ph": "M", "pid": _FIRST_PROCESS + rank, "tid": track}
    return [
        {**where, "name": f"{what}_name", "args": {"name": name}},
        {**where, "name": f"{what}_sort_index", "args": {"sort_index": place}},
    ]


def _records_of(
    event: Event, placement: Placement, tracks: _Tracks, messages: _Messages, clock: _Clock
) -> list[Record]:
    """The slice of one instruction, and the ends of arrows that belong to it."""
    instruction, end = event.instruction, event.end
    arrows: list[tuple[str, int]] = []
    match instruction:
        case SendActivation() | SendGradient():
            track = tracks.free("send", event.start, end)
            arrows = [("s", messages.arrows[instruction])]
        case ReceiveActivation(stage, microbatch):
            end = messages.arrival(SendActivation(stage - 1, microbatch), event)
            track = tracks.free("receive", event.start, end)
        case ReceiveGradient(stage, microbatch):
            end = messages.arrival(SendGradient(stage + 1, microbatch), event)
            track = tracks.free("receive", event.start, end)
        case ReduceGradient():
            track = tracks.free("reduce", event.start, end)
        case _:
            track = _COMPUTE
            arrows = [("f", messages.arrows[send]) for send in sends_to(instruction) if send in messages.arrows]
    where = {"pid": _FIRST_PROCESS + event.rank, "tid": track, "ts": clock.shown(event.start)}
    records = [{"ph": "X", **where, "dur": round(clock.shown(end) - where["ts"], 3), **_named(event, placement)}]
    for phase, number in arrows:
        binding = {"bp": "e"} if phase == "f" else {}
        records.append({"ph": phase, **where, "name": "message", "cat": "message", "id": number, **binding})
    return records


def sends_to(instruction: Instruction) -> tuple[Instruction, ...]:
    """The sends whose messages an instruction needs, where they come from another rank."""
    match instruction:
        case Forward(stage, microbatch):
            return (SendActivation(stage - 1, microbatch),)
        case Backward(stage, microbatch) | InputGradient(stage, microbatch):
            return (SendGradient(stage + 1, microbatch),)
        case Overlap(forward, backward):
            return (*sends_to(forward), *sends_to(backward))
        case _:
            return ()


def _named(event: Event, placement: Placement) -> Record:
    """What a viewer tells of a slice."""
    arguments = {name: getattr(event.instruction, name, None) for name in ("stage", "microbatch", "version")}
    arguments["why"] = why(event, placement) or None
    return {
        "name": str(event.instruction),
        "cat": type(event.instruction).__name__,
        "args": {name: value for name, value in arguments.items() if value is not None},
    }


def _counters(timeline: Timeline, clock: _Clock) -> list[Record]:
    """What each rank stashes, whenever it changes."""
    unit = memory_unit(timeline.costs)
    records = []
    for rank, memory in enumerate(timeline.memory):
        where = {"ph": "C", "pid": _FIRST_PROCESS + rank, "tid": _COMPUTE}
        levels = {clock.shown(clock.origin): 0.0} | dict(zip(map(clock.shown, memory.times), memory.values))
        records += [{**where, "ts": time, "name": "stash", "args": {unit: value}} for time, value in levels.items()]
    return records


def _moment(record: Record) -> tuple[float, int]:
    return record.get("ts", -1.0), _ORDER[record["ph"]]
