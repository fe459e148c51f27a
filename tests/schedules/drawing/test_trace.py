"""The trace: what Perfetto needs to draw tracks, arrows and counters."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from stagewright.schedules import Costs, Timeline, create, names, simulate
from stagewright.schedules.drawing import trace_text

Record = dict[str, Any]


def simulated(name: str, num_ranks: int, num_microbatches: int, costs: Costs | None = None) -> Timeline:
    schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return simulate(schedule.program(1 if schedule.synchronous else 3), costs)


def records_of(timeline: Timeline, **options: Any) -> list[Record]:
    records: list[Record] = json.loads(trace_text(timeline, **options))["traceEvents"]
    return records


def track_names(records: list[Record]) -> dict[tuple[int, int], str]:
    return {(each["pid"], each["tid"]): each["args"]["name"] for each in records if each["name"] == "thread_name"}


def of_phase(records: list[Record], phase: str) -> list[Record]:
    return [each for each in records if each["ph"] == phase]


COSTS = pytest.mark.parametrize(
    "costs", [Costs(), Costs(send=0.3), Costs(send=2.5, bandwidth=2, message_bytes=1, step=0.5, reduce=0.7)]
)


@pytest.mark.parametrize("name", names())
@COSTS
def test_every_arrow_leads_from_a_send_to_the_computation_that_needs_it(name: str, costs: Costs) -> None:
    records = records_of(simulated(name, 4, 8, costs))
    slices = of_phase(records, "X")
    starts, finishes = of_phase(records, "s"), of_phase(records, "f")
    assert sorted(arrow["id"] for arrow in starts) == sorted(arrow["id"] for arrow in finishes)
    assert len({arrow["id"] for arrow in starts}) == len(starts)
    assert len(starts) == sum("SEND" in each["name"] for each in slices)
    beginning: dict[tuple[int, int, float], list[str]] = {}
    for each in slices:
        beginning.setdefault((each["pid"], each["tid"], each["ts"]), []).append(each["name"])
    sent = {arrow["id"]: arrow for arrow in starts}
    for finish in finishes:
        start = sent[finish["id"]]
        tokens = beginning[start["pid"], start["tid"], start["ts"]]
        needed = beginning[finish["pid"], finish["tid"], finish["ts"]]
        assert any(consumer(token, other) for token in tokens for other in needed)
        assert finish["ts"] >= start["ts"]
        assert finish["bp"] == "e"


def consumer(send: str, token: str) -> bool:
    """Whether a token is, or fuses, the computation that needs what a send sends."""
    sent = re.fullmatch(r"(\d+)SEND_([FB])(\d+)", send)
    if sent is None:
        return False
    stage = int(sent[1]) + (1 if sent[2] == "F" else -1)
    kinds = "F" if sent[2] == "F" else "BI"
    return re.search(rf"\b{stage}[{kinds}]{sent[3]}\b", token) is not None


@pytest.mark.parametrize("name", names())
@COSTS
def test_times_are_sorted_and_slices_of_one_track_do_not_overlap(name: str, costs: Costs) -> None:
    records = records_of(simulated(name, 4, 8, costs))
    times = [each["ts"] for each in records if "ts" in each]
    assert times == sorted(times)
    assert times[0] == 0
    tracks: dict[tuple[int, int], list[Record]] = {}
    for each in of_phase(records, "X"):
        assert each["dur"] >= 0
        tracks.setdefault((each["pid"], each["tid"]), []).append(each)
    for slices in tracks.values():
        assert all(earlier["ts"] + earlier["dur"] <= later["ts"] + 1e-3 for earlier, later in pairwise(slices))


@pytest.mark.parametrize("name", names())
def test_ranks_and_tracks_are_named_and_in_order(name: str) -> None:
    records = records_of(simulated(name, 4, 8, Costs(send=2.5)))
    tracks = track_names(records)
    assert {(each["pid"], each["tid"]) for each in of_phase(records, "X")} <= tracks.keys()
    ranks = {each["pid"]: each["args"]["name"] for each in records if each["name"] == "process_name"}
    assert list(ranks.values()) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    places = {(r["pid"], r["tid"]): r["args"]["sort_index"] for r in records if r["name"] == "thread_sort_index"}
    for rank in ranks:
        ordered = [tracks[track] for track in sorted(places, key=lambda track: places[track]) if track[0] == rank]
        assert ordered[0] == "compute"
        kinds = [track.split()[0] for track in ordered]
        assert kinds == sorted(kinds, key=["compute", "send", "receive", "reduce"].index)
    kinds_of = {"SEND": "send", "RECV": "receive", "REDUCE_GRAD": "reduce"}
    for each in of_phase(records, "X"):
        kind = next((kind for mark, kind in kinds_of.items() if mark in each["name"]), "compute")
        assert tracks[each["pid"], each["tid"]].split()[0] == kind


def test_one_unit_of_time_is_shown_as_a_millisecond_or_as_asked() -> None:
    timeline = simulated("1f1b", 2, 2)
    for microseconds, options in [(1000, {}), (1e6, {"microseconds": 1e6})]:
        last = max(each["ts"] + each["dur"] for each in of_phase(records_of(timeline, **options), "X"))
        assert last == timeline.makespan * microseconds


def test_a_receive_lasts_from_its_posting_to_the_arrival() -> None:
    records = records_of(simulated("1f1b", 2, 1, Costs(send=0.5)))
    slices = {each["name"]: (each["ts"], each["ts"] + each["dur"]) for each in of_phase(records, "X")}
    assert slices["0SEND_F0"] == (1000, 1500)
    assert slices["1RECV_F0"] == (0, 1500)
    assert slices["1F0"] == (1500, 2500)


def test_the_counter_follows_the_stash() -> None:
    counters = [each for each in of_phase(records_of(simulated("1f1b", 2, 2)), "C") if each["pid"] == 1000]
    assert [(each["ts"], each["args"]) for each in counters] == [
        (0, {"stashes": 1.0}),
        (1000, {"stashes": 2.0}),
        (6000, {"stashes": 1.0}),
        (9000, {"stashes": 0.0}),
    ]


def test_a_slice_says_why_its_rank_waited() -> None:
    (slice_,) = [each for each in records_of(simulated("1f1b", 2, 2)) if each["name"] == "0B1"]
    assert slice_["args"] == {"stage": 0, "microbatch": 1, "why": "waited 1 for 1SEND_B1 from rank 1"}


def test_the_title_and_the_caption_go_along() -> None:
    head = json.loads(trace_text(simulated("1f1b", 2, 2), title='a "b"'))["otherData"]
    assert head["title"] == 'a "b"'
    assert head["caption"].startswith("2 ranks, 2 stages, 2 microbatches; makespan 9.")
