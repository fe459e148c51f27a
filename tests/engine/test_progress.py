"""Where a rank is, as it says itself and as others read it, even when it has gone."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from stagewright.engine.control.progress import REPLICAS, Place, Progress, open_page, read_place
from stagewright.schedules import create

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory without a name")

STREAM = create("2bw", num_ranks=3, num_microbatches=4).program(steps=2).streams[1]


def opened(progress: Progress) -> int:
    assert progress.file is not None
    page = open_page(os.getpid(), progress.file, progress.token)
    assert page is not None
    return page


def test_every_instruction_is_read_as_it_is_written() -> None:
    progress = Progress(1, shared=True)
    other = progress.add(create("gpipe", num_ranks=3, num_microbatches=4).program().streams[1])
    number = progress.add(STREAM)
    page = opened(progress)
    assert read_place(page) == progress.place == Place()
    progress.begin(other, 6)
    progress.begin(number, 7)
    for index, instruction in enumerate(STREAM):
        progress.cells[0] = index
        assert read_place(page) == progress.place == Place(7, str(instruction))
    progress.end()
    assert read_place(page) == progress.place == Place(7)
    os.close(page)
    progress.close()


def test_numbers_of_later_batches_are_the_real_ones() -> None:
    progress = Progress(1, shared=True)
    progress.begin(progress.add(STREAM), 7, later_microbatches=100, later_versions=20)
    index = next(index for index, instruction in enumerate(STREAM) if str(instruction) == "1B3@0")
    progress.cells[0] = index
    page = opened(progress)
    assert str(progress.place) == str(read_place(page)) == "at 1B103@20 (step 7)"
    os.close(page)
    progress.close()


def test_whom_it_waits_for() -> None:
    progress = Progress(0)
    seen = [progress.awaited]
    for awaited in (0, 3, REPLICAS):
        progress.await_rank(awaited)
        seen.append(progress.awaited)
    before = progress.snapshot
    progress.awaits_nobody()
    assert [*seen, progress.awaited] == [None, 0, 3, REPLICAS, None]
    assert progress.snapshot != before


@pytest.mark.parametrize(
    ("place", "words", "last"),
    [
        (Place(7, "1B3"), "at 1B3 (step 7)", "its last instruction was 1B3 (step 7)"),
        (Place(7), "after step 7", "it had ended step 7"),
        (Place(), "before its first step", "it had not begun its first step"),
    ],
)
def test_a_place_in_words(place: Place, words: str, last: str) -> None:
    assert (str(place), place.last) == (words, last)


def test_a_page_outlives_its_process_for_whoever_has_it_open(tmp_path: Path) -> None:
    script = """
        import sys, time
        from stagewright.engine.control.progress import Progress
        from stagewright.schedules import create

        progress = Progress(1, shared=True)
        progress.begin(progress.add(create("1f1b", num_ranks=2, num_microbatches=4).program().streams[1]), 3)
        progress.cells[0] = 2
        print(progress.file, progress.token.hex(), progress.place, flush=True)
        time.sleep(60)
    """
    (tmp_path / "script.py").write_text(dedent(script))
    with subprocess.Popen([sys.executable, tmp_path / "script.py"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        file, token, words = process.stdout.readline().split(maxsplit=2)
        assert open_page(process.pid, int(file), bytes(32)) is None, "it is not what was said to be there"
        page = open_page(process.pid, int(file), bytes.fromhex(token))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert page is not None
    assert str(read_place(page)) == words.strip()
    os.close(page)
    assert open_page(process.pid, int(file), bytes.fromhex(token)) is None


@pytest.mark.parametrize("damage", [{0: 10**9}, {1: 10**12}, {2: -5}, {2: 10**15}, {0: -1}, {6: 77}, {3: 2**62}])
def test_a_page_that_makes_no_sense_tells_at_least_the_step(damage: dict[int, int]) -> None:
    progress = Progress(1, shared=True)
    progress.begin(progress.add(STREAM), 7)
    for cell, value in damage.items():
        progress.cells[cell] = value
    page = opened(progress)
    assert read_place(page).step in (7, 2**62)
    os.close(page)
    progress.close()
