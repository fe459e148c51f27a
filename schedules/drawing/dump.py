"""The JSON dump: all that a timeline says, for other programs."""

import json
from typing import Any

from stagewright.schedules.drawing.cells import Shades, parts_of
from stagewright.schedules.timeline import Event, Timeline


def json_text(timeline: Timeline, *, title: str = "") -> str:
    """Write a timeline as JSON, times and bytes in the units of its costs.

    The object holds

    * ``title``, and the shape: ``num_ranks``, ``num_stages``, ``num_microbatches`` (of one batch), ``num_batches``;
    * ``routes``: which rank owns each stage, a list a route; ``assignment``: the route of each microbatch of a batch,
      empty where there is one route;
    * ``makespan``, ``span``, ``ideal``; ``bubble_fraction`` = idle / (P x makespan); ``bubble_overhead`` = (makespan -
      ideal) / ideal; ``span_bubble`` = (span - ideal) / span;
    * ``ranks``, each with ``busy``, ``peak_stash``, ``peak_bytes``, ``memory`` (a list of [time, bytes from then on])
      and ``events`` in the order of the rank's stream.

    An event has ``instruction`` (its token), ``start``, ``end``, ``waited`` (how long its rank stood still before it),
    ``waited_for`` (a token or null) and ``computes``: two computations if it is a fused pair, none if it does not
    compute, else one; each with ``kind`` (F, B, I or W), ``stage``, ``microbatch`` and ``version`` (null where it
    names none).
    """
    program = timeline.program
    document = {
        "title": title,
        "num_ranks": program.num_ranks,
        "num_stages": program.num_stages,
        "num_microbatches": program.num_microbatches,
        "num_batches": program.num_batches,
        "routes": program.placement.routes,
        "assignment": program.placement.assignment,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "ideal": timeline.ideal,
        "bubble_fraction": timeline.bubble_fraction,
        "bubble_overhead": timeline.bubble_overhead,
        "span_bubble": timeline.span_bubble,
        "ranks": [_rank(rank, timeline) for rank in range(program.num_ranks)],
    }
    return json.dumps(document, indent=1) + "\n"


def _rank(rank: int, timeline: Timeline) -> dict[str, Any]:
    memory = timeline.memory[rank]
    shades = Shades(timeline.program.placement)
    return {
        "rank": rank,
        "busy": timeline.busy[rank],
        "peak_stash": timeline.peak_stash[rank],
        "peak_bytes": memory.peak,
        "memory": list(zip(memory.times, memory.values)),
        "events": [_event(event, shades) for event in timeline.events[rank]],
    }


def _event(event: Event, shades: Shades) -> dict[str, Any]:
    computes = [
        {"kind": part.kind, "stage": part.stage, "microbatch": part.microbatch, "version": part.version}
        for part in parts_of(event.instruction, event.rank, shades)
    ]
    return {
        "instruction": str(event.instruction),
        "start": event.start,
        "end": event.end,
        "waited": event.waited,
        "waited_for": None if event.waited_for is None else str(event.waited_for),
        "computes": computes,
    }
