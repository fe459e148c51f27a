"""The SVG picture: valid, with one box a computation, in the right place and colour."""

import os
import subprocess
import sys
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from stagewright.schedules import Costs, Program, ScheduleError, Timeline, create, names, simulate
from stagewright.schedules.drawing import svg_text
from stagewright.schedules.drawing.palettes import PALETTES, hexadecimal, palette_of

SVG = "{http://www.w3.org/2000/svg}"
FUSED = (
    "0F0,1F1,(0F2;1B1)OVERLAP_F_B,(1F3;0B0)OVERLAP_F_B,1B3,0B2\n"
    "0F1,1F0,(0F3;1B0)OVERLAP_F_B,(1F2;0B1)OVERLAP_F_B,1B2,0B3\n"
)


def simulated(name: str, num_ranks: int, num_microbatches: int, steps: int = 1, costs: Costs | None = None) -> Timeline:
    return simulate(create(name, num_ranks=num_ranks, num_microbatches=num_microbatches).program(steps), costs)


def drawn(timeline: Timeline, palette: str = "megatron") -> Element:
    return ElementTree.fromstring(svg_text(timeline, palette=palette))


def ranks_of(root: Element) -> list[Element]:
    return [group for group in root.iter(f"{SVG}g") if group.get("class") == "rank"]


def boxes_of(rank: Element) -> list[tuple[str, Element]]:
    """Every box of a rank's computations under its title, borders of fused pairs left out."""
    return [
        (group.findtext(f"{SVG}title", ""), rect)
        for group in rank.findall(f"{SVG}g")
        for rect in group.findall(f"{SVG}rect")
        if rect.get("class") != "fused"
    ]


def number(element: Element, name: str) -> float:
    return float(element.get(name, "nan"))


def test_one_box_for_every_computation_and_one_for_idle_time() -> None:
    ranks = ranks_of(drawn(simulated("1f1b", 4, 8)))
    assert [rank.findtext(f"{SVG}text") for rank in ranks] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    for rank in ranks:
        assert len(boxes_of(rank)) == 16
        (idle,) = rank.findall(f"{SVG}rect")
        assert idle.get("fill") == "#ffffff"


def test_boxes_stand_at_their_time() -> None:
    timeline = simulated("1f1b", 2, 3, costs=Costs(forward=1, backward=2, send=0.5))
    root = drawn(timeline)
    idle = ranks_of(root)[0].find(f"{SVG}rect")
    assert idle is not None
    left, scale = number(idle, "x"), number(idle, "width") / timeline.makespan
    for rank, events in zip(ranks_of(root), timeline.events):
        computing = [event for event in events if event.end > event.start and "SEND" not in str(event.instruction)]
        assert len(computing) == 6
        for event, (title, box) in zip(computing, boxes_of(rank)):
            assert title.startswith(f"{event.instruction}: {event.start:g} to {event.end:g}")
            assert number(box, "x") == pytest.approx(left + event.start * scale, abs=0.01)
            assert number(box, "width") == pytest.approx((event.end - event.start) * scale, abs=0.01)


def test_a_title_says_why_its_rank_waited() -> None:
    titles = [title for title, _ in boxes_of(ranks_of(drawn(simulated("1f1b", 2, 2)))[0])]
    assert titles == [
        "0F0: 0 to 1",
        "0F1: 1 to 2",
        "0B0: 4 to 6, waited 2 for 1SEND_B0 from rank 1",
        "0B1: 7 to 9, waited 1 for 1SEND_B1 from rank 1",
    ]


def test_the_digit_is_the_microbatch_and_the_hue_the_kind() -> None:
    palette = palette_of("torch")
    rank = ranks_of(drawn(simulated("zb-h1", 2, 3), "torch"))[1]
    seen = [(box.get("fill"), label.text) for _, box, label in labelled(rank)]
    assert seen == [
        (hexadecimal(palette.color(kind)), microbatch)
        for kind, microbatch in ["F0", "I0", "F1", "I1", "W0", "F2", "I2", "W1", "W2"]
    ]


def labelled(rank: Element) -> list[tuple[str, Element, Element]]:
    found = []
    for group in rank.findall(f"{SVG}g"):
        box, label = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        if box is not None and label is not None:
            found.append((group.findtext(f"{SVG}title", ""), box, label))
    return found


def test_the_lightness_is_the_chunk() -> None:
    palette = palette_of("megatron")
    timeline = simulate(create("interleaved", num_ranks=2, num_microbatches=4, num_chunks=2).program())
    fills = {box.get("fill") for rank in ranks_of(drawn(timeline)) for _, box in boxes_of(rank)}
    assert fills == {hexadecimal(palette.color(kind, chunk, 2)) for kind in "FB" for chunk in (0, 1)}


def test_a_fused_pair_is_two_boxes_in_one_border() -> None:
    (rank, _) = ranks_of(drawn(simulate(Program.from_csv(FUSED))))
    borders = [box for box in rank.iter(f"{SVG}rect") if box.get("class") == "fused"]
    assert len(borders) == 2
    assert len(boxes_of(rank)) == 8
    pair = [box for title, box in boxes_of(rank) if title.startswith("(0F2;1B1)OVERLAP_F_B")]
    assert [box.get("fill") for box in pair] == [
        hexadecimal(palette_of("megatron").color("F", 0, 2)),
        hexadecimal(palette_of("megatron").color("B", 1, 2)),
    ]
    assert (borders[0].get("fill"), borders[0].get("stroke-width")) == ("none", "2")
    assert number(borders[0], "x") == number(pair[0], "x")
    assert number(pair[1], "x") == pytest.approx(number(pair[0], "x") + number(pair[0], "width"), abs=0.01)
    assert number(borders[0], "width") == pytest.approx(number(pair[0], "width") + number(pair[1], "width"), abs=0.01)


def test_weight_versions_are_tints_and_small_digits() -> None:
    palette = palette_of("megatron")
    root = drawn(simulated("2bw", 2, 2, steps=3))
    for rank in ranks_of(root):
        for group in rank.findall(f"{SVG}g"):
            title = group.findtext(f"{SVG}title", "")
            if "STEP" not in title:
                token = title.split(":")[0]
                version = int(token.split("@")[1])
                assert version == max(int(token[2 : token.index("@")]) // 2 - 1, 0)
                box = group.find(f"{SVG}rect")
                assert box is not None
                assert box.get("fill") == hexadecimal(palette.color(token[1], version=version))
                assert [text.text for text in group.findall(f"{SVG}text")][1:] == [str(version)]
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert "weight version 0" in words
    assert "weight version 1" in words


@pytest.mark.parametrize(("name", "steps", "num_marks"), [("1f1b", 1, 1), ("2bw", 3, 3), ("pipedream", 1, 4)])
def test_every_step_is_marked(name: str, steps: int, num_marks: int) -> None:
    root = drawn(simulated(name, 2, 4, steps))
    for rank in ranks_of(root):
        assert sum(group.get("class") == "step" for group in rank.iter(f"{SVG}g")) == num_marks
    assert "optimizer step" in [text.text for text in root.iter(f"{SVG}text")]


def test_numbers_that_do_not_fit_are_left_out_and_boxes_are_not() -> None:
    root = drawn(simulated("gpipe", 2, 600))
    for rank in ranks_of(root):
        assert len(boxes_of(rank)) == 1200
        assert [text.text for text in rank.iter(f"{SVG}text")] == [rank.findtext(f"{SVG}text")]
    assert float(root.get("width", "inf")) < 6200


def test_the_time_axis_has_round_numbers() -> None:
    (axis,) = [group for group in drawn(simulated("1f1b", 4, 8)).iter(f"{SVG}g") if group.get("class") == "axis"]
    assert [text.text for text in axis.iter(f"{SVG}text")] == ["0", "5", "10", "15", "20", "25", "30", "time"]


def test_the_caption_says_what_each_bubble_is_a_share_of() -> None:
    words = " ".join(text.text or "" for text in drawn(simulated("1f1b", 4, 8)).iter(f"{SVG}text"))
    assert "4 ranks, 4 stages, 8 microbatches; makespan 33." in words
    assert "Bubble fraction 27.3% = idle / (ranks × makespan)" in words
    assert "bubble overhead 37.5% = (makespan − ideal) / ideal" in words


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("palette", PALETTES)
def test_every_schedule_is_drawn_within_its_page(name: str, palette: str) -> None:
    schedule = create(name, num_ranks=4, num_microbatches=8)
    root = drawn(simulate(schedule.program(1 if schedule.synchronous else 3)), palette)
    width, height = number(root, "width"), number(root, "height")
    for rect in root.iter(f"{SVG}rect"):
        assert 0 <= number(rect, "x") <= number(rect, "x") + number(rect, "width") <= width
        assert 0 <= number(rect, "y") <= number(rect, "y") + number(rect, "height") <= height
    for text in root.iter(f"{SVG}text"):
        if text.get("text-anchor") is None:
            assert number(text, "x") + 0.5 * number(text, "font-size") * len(text.text or "") < width
    assert not {element.tag.removeprefix(SVG) for element in root.iter()} & {"script", "style", "image", "use", "a"}


def test_text_is_escaped() -> None:
    root = ElementTree.fromstring(svg_text(simulated("1f1b", 2, 2), title='<b> & "c"'))
    assert root.findtext(f"{SVG}title") == '<b> & "c"'


def test_a_notebook_shows_the_same_picture() -> None:
    timeline = simulated("1f1b", 2, 2)
    assert timeline._repr_svg_() == svg_text(timeline)


def test_the_same_timeline_gives_the_same_bytes_in_every_process() -> None:
    program = "from stagewright.schedules import *; from stagewright.schedules.drawing import *; import sys; "
    program += "timeline = simulate(create('dualpipe', num_ranks=4, num_microbatches=8).program()); "
    program += "sys.stdout.write(svg_text(timeline) + html_text(timeline) + trace_text(timeline) + json_text(timeline))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_an_unknown_palette_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no palette"):
        svg_text(simulated("1f1b", 2, 2), palette="pink")
