"""The JSON dump: complete, and literal for a small shape."""

import json
from typing import Any

import pytest

from stagewright.schedules import Costs, Timeline, create, names, parse, simulate
from stagewright.schedules.drawing import json_text


def dumped(timeline: Timeline) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json_text(timeline))
    return document


def simulated(name: str, num_ranks: int, num_microbatches: int, costs: Costs | None = None) -> Timeline:
    schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return simulate(schedule.program(1 if schedule.synchronous else 3), costs)


def test_a_small_one_literally() -> None:
    document = dumped(simulated("1f1b", 2, 1))
    ranks = document.pop("ranks")
    assert document == {
        "title": "",
        "num_ranks": 2,
        "num_stages": 2,
        "num_microbatches": 1,
        "num_batches": 1,
        "routes": [[0, 1]],
        "assignment": [],
        "makespan": 6.0,
        "span": 6.0,
        "ideal": 3.0,
        "bubble_fraction": 0.5,
        "bubble_overhead": 1.0,
        "span_bubble": 0.5,
    }
    assert ranks[0]["rank"] == 0
    assert ranks[0]["busy"] == 3.0
    assert ranks[0]["peak_stash"] == 1
    assert ranks[0]["peak_bytes"] == 1.0
    assert ranks[0]["memory"] == [[0.0, 1.0], [6.0, 0.0]]
    (backward,) = [event for event in ranks[0]["events"] if event["instruction"] == "0B0"]
    assert backward == {
        "instruction": "0B0",
        "start": 4.0,
        "end": 6.0,
        "waited": 3.0,
        "waited_for": "1SEND_B0",
        "computes": [{"kind": "B", "stage": 0, "microbatch": 0, "version": None}],
    }


def test_the_bubbles_are_those_of_the_timeline() -> None:
    timeline = simulated("zb-h2", 4, 8)
    document = dumped(timeline)
    ratios = {name: document[name] for name in ("bubble_fraction", "bubble_overhead", "span_bubble")}
    assert ratios == {name: getattr(timeline, name) for name in ratios}
    assert len(set(ratios.values())) == 3
    assert (document["makespan"], document["span"]) == (timeline.makespan, timeline.span)


@pytest.mark.parametrize("name", names())
def test_every_instruction_is_there_with_its_times(name: str) -> None:
    timeline = simulated(name, 4, 8, Costs(send=0.5))
    document = dumped(timeline)
    for rank, stream in enumerate(timeline.program.streams):
        events = document["ranks"][rank]["events"]
        assert tuple(parse(event["instruction"]) for event in events) == stream
        assert [(event["start"], event["end"]) for event in events] == [
            (event.start, event.end) for event in timeline.events[rank]
        ]


def test_a_fused_pair_computes_twice_and_a_send_nothing() -> None:
    events = [event for rank in dumped(simulated("dualpipe", 2, 4))["ranks"] for event in rank["events"]]
    pairs = [event for event in events if "OVERLAP" in event["instruction"]]
    assert pairs
    assert all([part["kind"] for part in pair["computes"]] == ["F", "B"] for pair in pairs)
    assert all(event["computes"] == [] for event in events if "SEND" in event["instruction"])


def test_versions_are_kept() -> None:
    events = dumped(simulated("2bw", 2, 2))["ranks"][0]["events"]
    assert {part["version"] for event in events for part in event["computes"]} == {0, 1}
