"""The HTML page: whole in itself, and carrying all that its script draws."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from stagewright.schedules import Costs, Timeline, create, names, simulate
from stagewright.schedules.drawing import html_text
from stagewright.schedules.drawing.palettes import hexadecimal, ink_on, palette_of

# Elements and attributes by which a page could load something.
LOADING = {"link", "img", "iframe", "object", "embed", "audio", "video", "source", "base", "form", "a"}
VOID = {"meta", "br", "input"}


class Page(HTMLParser):
    """Takes a page apart, and sees to it that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def simulated(name: str, num_ranks: int, num_microbatches: int, steps: int = 1, costs: Costs | None = None) -> Timeline:
    return simulate(create(name, num_ranks=num_ranks, num_microbatches=num_microbatches).program(steps), costs)


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="timeline">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.mark.parametrize("name", names())
def test_it_loads_nothing(name: str) -> None:
    schedule = create(name, num_ranks=4, num_microbatches=8)
    text = html_text(simulate(schedule.program(1 if schedule.synchronous else 3)))
    page = Page(text)
    assert page.open == []
    assert not {tag for tag, _ in page.elements} & LOADING
    assert not {attribute for _, attributes in page.elements for attribute in attributes} & {"src", "href", "srcset"}
    assert not re.search(r"https?://|//[a-z]|@import|url\(|fetch\(|XMLHttpRequest|import\(", text.replace("// ", ""))
    assert "default-src 'none'" in text  # and a browser would not let it


def test_cells_have_token_time_colour_and_reason() -> None:
    data = data_of(html_text(simulated("1f1b", 2, 2)))
    palette = palette_of("megatron")
    forward, backward = palette.color("F"), palette.color("B")
    assert data["styles"] == [[hexadecimal(color), hexadecimal(ink_on(color))] for color in (forward, backward)]
    assert data["ranks"][0]["cells"] == [
        [0, 1, "0F0", [[0, "0", ""]], "", None],
        [1, 2, "0F1", [[0, "1", ""]], "", None],
        [4, 6, "0B0", [[1, "0", ""]], "waited 2 for 1SEND_B0 from rank 1", [1, 1]],
        [7, 9, "0B1", [[1, "1", ""]], "waited 1 for 1SEND_B1 from rank 1", [1, 3]],
    ]
    assert [cell[2] for cell in data["ranks"][1]["cells"]] == ["1F0", "1B0", "1F1", "1B1"]


def test_a_cause_is_the_cell_that_sent_what_was_waited_for() -> None:
    data = data_of(html_text(simulated("zb-h1", 4, 6, costs=Costs(send=0.25))))
    causes = 0
    for lane in data["ranks"]:
        for start, _, token, _, why, cause in lane["cells"]:
            assert bool(why) == (cause is not None)
            if cause:
                rank, index = cause
                sender = data["ranks"][rank]["cells"][index]
                stage, kind, microbatch = int(token[0]), token[1], token[2:]
                assert sender[2] == (f"{stage - 1}F{microbatch}" if kind == "F" else f"{stage + 1}I{microbatch}")
                assert start == sender[1] + 0.25
                causes += 1
    assert causes > 10


def test_under_each_rank_is_what_it_stashes() -> None:
    data = data_of(html_text(simulated("1f1b", 2, 2)))
    assert data["unit"] == "stashes"
    assert data["ranks"][0]["stash"] == [[0, 1], [1, 2], [6, 1], [9, 0]]
    assert data["ranks"][1]["stash"] == [[1, 1], [4, 1], [7, 0]]
    assert [lane["peak"] for lane in data["ranks"]] == [2, 1]


def test_bytes_are_called_bytes() -> None:
    data = data_of(html_text(simulated("1f1b", 2, 2, costs=Costs(activation_bytes=30, weight_bytes=12))))
    assert data["unit"] == "bytes"
    assert data["ranks"][0]["peak"] == 84


def test_steps_versions_and_fused_pairs_are_there() -> None:
    twice = data_of(html_text(simulated("2bw", 2, 2, steps=3)))
    assert [step[1] for step in twice["ranks"][0]["steps"]] == ["0STEP@1", "0STEP@2", "0STEP@3"]
    assert {part[2] for lane in twice["ranks"] for cell in lane["cells"] for part in cell[3]} == {"0", "1"}
    fused = data_of(html_text(simulated("dualpipe", 2, 4)))
    pairs = [cell for lane in fused["ranks"] for cell in lane["cells"] if len(cell[3]) == 2]
    assert pairs
    assert all(cell[2].endswith("OVERLAP_F_B") for cell in pairs)


def test_title_and_caption_are_escaped() -> None:
    text = html_text(simulated("1f1b", 2, 2), title="</script><b>$data & co")
    page = Page(text)
    assert "".join(page.texts["title"]) == "".join(page.texts["h1"]) == "</script><b>$data & co"
    assert "b" not in {tag for tag, _ in page.elements}
    assert "Bubble fraction 33.3% = idle / (ranks × makespan)" in text
