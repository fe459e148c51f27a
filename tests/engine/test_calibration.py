"""Calibration: costs from the steps of a run, the same on all ranks; what a hop takes told apart from its bytes."""

from math import inf

import pytest
from launching import launch_on
from measuring import BACKWARD_SECONDS, FORWARD_SECONDS, NUM_MICROBATCHES, measure_steps

from stagewright.engine.timing.calibration import with_bandwidth
from stagewright.engine.timing.trace import NUM_KEPT
from stagewright.schedules import Costs, Timeline, simulate
from stagewright.schedules.drawing import grid_text, html_text, json_text, svg_text, trace_text
from stagewright.schedules.drawing.overlay import overlay_html, overlay_svg
from stagewright.schedules.explanation import explain
from stagewright.schedules.recording import Recording


@pytest.fixture(scope="module")
def of_ranks() -> list[tuple[list[Timeline], Costs]]:
    return launch_on("gloo", measure_steps, 2, ("1f1b", 4))


@pytest.fixture
def timeline(of_ranks: list[tuple[list[Timeline], Costs]]) -> Timeline:
    return of_ranks[0][0][-1]


def test_all_ranks_get_the_same_costs(of_ranks: list[tuple[list[Timeline], Costs]]) -> None:
    assert of_ranks[0][1] == of_ranks[1][1]


def test_costs_are_what_stages_take(of_ranks: list[tuple[list[Timeline], Costs]]) -> None:
    costs = of_ranks[0][1].of_stages(2)
    assert all(seconds >= FORWARD_SECONDS for seconds in costs.forward)
    assert all(seconds >= BACKWARD_SECONDS for seconds in costs.backward)
    assert costs.send[0] > 0 or costs.transfer[0] > 0
    assert of_ranks[0][1].message_bytes == (12.0, 0.0)  # a row of three fp32


def test_a_step_is_predicted_to_take_no_less_than_the_schedule_says(
    of_ranks: list[tuple[list[Timeline], Costs]],
) -> None:
    predicted = simulate(of_ranks[0][0][-1].program, of_ranks[0][1])
    assert predicted.makespan >= (NUM_MICROBATCHES + 1) * (FORWARD_SECONDS + BACKWARD_SECONDS)


def test_the_first_step_of_all_is_left_out(of_ranks: list[tuple[list[Timeline], Costs]]) -> None:
    assert len(of_ranks[0][0]) == 3


def test_no_more_steps_are_kept_than_a_calibration_needs() -> None:
    timelines, _ = launch_on("threads", measure_steps, 1, ("gpipe", NUM_KEPT + 2))[0]
    assert len(timelines) == NUM_KEPT


def test_a_measured_timeline_has_every_ratio(timeline: Timeline) -> None:
    assert 0 < timeline.bubble_fraction < 1
    assert timeline.bubble_overhead > 0
    assert timeline.makespan >= timeline.span >= timeline.ideal > 0
    assert timeline.steady_period > 0
    assert timeline.peak_stash == (2, 1)
    path = timeline.critical_path
    assert path.computing + path.communicating + path.idle == pytest.approx(timeline.makespan)


def test_a_measured_timeline_can_be_drawn(timeline: Timeline) -> None:
    assert [line.count("F") for line in grid_text(timeline).splitlines()] == [NUM_MICROBATCHES] * 2
    assert svg_text(timeline).count("<title>0F") == NUM_MICROBATCHES
    assert "0F3" in html_text(timeline)
    assert '"instruction": "0F3"' in json_text(timeline)
    assert '"name":"0F3"' in trace_text(timeline, microseconds=1e6)


def test_a_measured_timeline_can_be_laid_over_its_prediction(timeline: Timeline) -> None:
    predicted = simulate(timeline.program)
    svg = overlay_svg(predicted, timeline)
    assert svg.count("<title>0F") == 2 * NUM_MICROBATCHES
    assert svg.count(">measured<") == 2
    assert overlay_html(predicted, timeline).count('"name":"measured"') == 2


def test_a_measured_timeline_can_be_written_read_and_explained(timeline: Timeline) -> None:
    read = Recording.from_json(Recording.of("1f1b", Costs(), [timeline]).to_json()).typical
    assert (read.starts, read.ends) == (timeline.starts, timeline.ends)
    for split in explain(read).splits:
        assert split.step == pytest.approx(timeline.makespan)
        assert split.computing + split.bubble == pytest.approx(split.step)


@pytest.mark.parametrize("schedule", ["2bw", "pipedream", "zbv", "dualpipe"])
def test_windows_and_pairs_are_explained_too(schedule: str) -> None:
    timelines, costs = launch_on("threads", measure_steps, 2, (schedule, 3))[0]
    explanation = explain(timelines[-1], costs)
    for split in explanation.splits:
        assert split.computing + split.bubble == pytest.approx(split.step)
    assert explanation.predicted.makespan > 0


def test_what_a_hop_takes_beyond_an_empty_message_is_laid_to_its_bytes() -> None:
    costs = with_bandwidth(Costs(), hops=(3.0, 5.0, 0.0), sizes=(200.0, 400.0, 0.0), latency=1.0)
    assert costs.bandwidth == 100
    assert costs.send == (1, 1, 0)
    assert costs.of_stages(3).transfer == (2, 4, 0)


def test_a_hop_no_slower_than_an_empty_message_has_bandwidth_without_end() -> None:
    costs = with_bandwidth(Costs(), hops=(3.0, 0.0), sizes=(200.0, 0.0), latency=4.0)
    assert costs.bandwidth == inf
    assert costs.send == (3, 0)
