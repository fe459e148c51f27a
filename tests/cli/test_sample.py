"""The text that the trained model writes: the same for every cut, and the text of a plain loop without a cache."""

import io
import subprocess
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from stagewright.cli.bubble import Bubble
from stagewright.cli.metrics import TrainResult
from stagewright.cli.report import print_result, readable
from stagewright.cli.sample import continue_prompts, first_byte_read
from stagewright.cli.settings import TrainSettings
from stagewright.cli.train_command import train_rank
from stagewright.engine import Pipeline, RankContext, launch_local
from stagewright.models import GPTConfig, GPTStage, Sampler, build_gpt_stage, derive_seed
from stagewright.schedules import create, names

CONFIG = GPTConfig(num_layers=8, hidden_size=16, num_heads=2, sequence_length=12)
PROMPTS = (b"def ", b"import")
SEED = 5

CUTS = [("1f1b", 1, 4), ("1f1b", 2, 4), ("1f1b", 4, 4), ("gpipe", 8, 1)]
CUTS_WITH_SEVERAL_STAGES_A_RANK = [("interleaved", 2, 4), ("interleaved", 4, 4), ("dualpipev", 2, 4), ("hanayo", 2, 4)]
CUTS_WITH_SEVERAL_COPIES_OF_A_STAGE = [("dualpipe", 2, 4), ("dualpipe", 4, 8), ("chimera", 4, 4)]
CUTS_IF_REGISTERED = [("zbv", 2, 4), ("zbv", 4, 8)]


def build_stage(stage: int, num_stages: int) -> GPTStage:
    """One with weights of the size of trained ones: with those it starts from, what came before hardly matters."""
    module = build_gpt_stage(CONFIG, stage, num_stages, seed=3, dtype=torch.float64)
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(8)
    return module


def sample_in_threads(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    prompts: Sequence[bytes],
    num_bytes: int,
    temperature: float = 1.0,
) -> tuple[bytes, ...]:
    def one_rank(context: RankContext) -> tuple[bytes, ...]:
        build = partial(build_stage, num_stages=schedule.num_stages)
        with Pipeline(build, schedule=schedule, transport=context.transport) as pipe:
            settings = {"sequence": 12, "temperature": temperature, "seed": SEED}
            return continue_prompts(pipe, context, prompts, num_bytes, **settings)

    schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    results = launch_local(one_rank, num_ranks, backend="threads")
    assert results == [results[0]] * num_ranks, "every rank has the text"
    first: tuple[bytes, ...] = results[0]
    return first


@cache
def sample_plainly(prompt: bytes, index: int, num_bytes: int, temperature: float = 1.0) -> bytes:
    """One prompt, one process, no cache: a full forward for every byte."""
    model, text = build_stage(0, 1).eval(), bytearray(prompt)
    sampler = Sampler(temperature, derive_seed(SEED, f"prompt.{index}"))
    for _ in range(num_bytes):
        with torch.no_grad():
            logits = model(torch.tensor([list(text[first_byte_read(len(text), 12) :])]))
        text.append(sampler.draw(logits[0, -1]))
    return bytes(text[len(prompt) :])


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches"),
    CUTS + CUTS_WITH_SEVERAL_STAGES_A_RANK + CUTS_WITH_SEVERAL_COPIES_OF_A_STAGE + CUTS_IF_REGISTERED,
)
def test_every_cut_writes_what_a_plain_loop_writes(name: str, num_ranks: int, num_microbatches: int) -> None:
    if name not in names():
        pytest.skip(f"{name} is not registered")
    texts = sample_in_threads(name, num_ranks, num_microbatches, PROMPTS, num_bytes=20)
    assert texts == tuple(sample_plainly(prompt, index, 20) for index, prompt in enumerate(PROMPTS))


@pytest.mark.parametrize(
    "prompts", [(b"x",), (b"a", b"b", b"c"), (b"of twelve---", b"of thirteen--"), (b"long " * 9, b"y")]
)
def test_any_prompts(prompts: tuple[bytes, ...]) -> None:
    texts = sample_in_threads("1f1b", 2, 4, prompts, num_bytes=9)
    assert texts == tuple(sample_plainly(prompt, index, 9) for index, prompt in enumerate(prompts))


def test_no_prompts_no_text() -> None:
    assert sample_in_threads("1f1b", 2, 4, (), num_bytes=9) == ()


def test_the_same_prompt_twice_is_continued_in_two_ways_but_in_one_at_temperature_0() -> None:
    one, other = sample_in_threads("1f1b", 2, 4, (b"same", b"same"), num_bytes=12)
    assert one != other
    one, other = sample_in_threads("1f1b", 2, 4, (b"same", b"same"), num_bytes=12, temperature=0.0)
    assert one == other == sample_plainly(b"same", 0, 12, 0.0)


@pytest.mark.parametrize(
    ("sequence", "firsts"),
    [
        (1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (2, [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (4, [0, 0, 0, 0, 2, 2, 4, 4, 6, 6]),
        (5, [0, 0, 0, 0, 0, 3, 3, 3, 6, 6]),
    ],
)
def test_a_text_longer_than_the_positions_is_read_from_half_a_sequence_later(sequence: int, firsts: list[int]) -> None:
    assert [first_byte_read(length, sequence) for length in range(1, 11)] == firsts


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"the quick brown fox number {number} jumps over the lazy dog\n" for number in range(200)))
    return file


SHAPE: dict[str, Any] = {"layers": 8, "hidden": 16, "heads": 2, "sequence": 16, "batch_size": 8, "steps": 15}


def train_in_threads(text: Path, name: str, num_ranks: int) -> TrainResult:
    schedule = create(name, num_ranks=num_ranks, num_microbatches=4)
    settings = TrainSettings(schedule, data=text, sample=("the ", "fox"), sample_bytes=24, quiet=True, **SHAPE)
    results = launch_local(partial(train_rank, settings), num_ranks, backend="threads")
    (result,) = [result for result in results if result is not None]
    assert isinstance(result, TrainResult)
    return result


def test_the_trained_model_writes_the_same_text_for_every_schedule_and_number_of_ranks(text: Path) -> None:
    alone = train_in_threads(text, "1f1b", 1).continuations
    assert [len(continuation) for continuation in alone] == [24, 24]
    for name, num_ranks in (("1f1b", 2), ("gpipe", 4), ("interleaved", 2), ("dualpipev", 2), ("dualpipe", 2)):
        assert train_in_threads(text, name, num_ranks).continuations == alone, (name, num_ranks)


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], TORCHRUN])
def test_the_command_prints_the_text_below_the_table(text: Path, launcher: list[str]) -> None:
    flags = [part for name, value in SHAPE.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    sample = ["--sample", "the ", "fox", "--sample-bytes", "24", "--quiet", "--microbatches", "4"]
    command = [sys.executable, *launcher, "-m", "stagewright.cli", "train", "--data", str(text), *flags, *sample]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=240)
    assert done.returncode == 0, done.stderr
    table, printed = done.stdout.split("\n\n", maxsplit=1)
    first, second = (readable(text, "utf-8") for text in train_in_threads(text, "1f1b", 1).continuations)
    assert table.splitlines()[-1].startswith("bubble, measured")
    assert printed == f"the {first}\n\nfox{second}\n".expandtabs(8)


def printed(prompt: str, continuation: bytes, encoding: str = "utf-8") -> str:
    """What stands below the table."""
    settings = TrainSettings(create("1f1b", num_ranks=2, num_microbatches=4), sample=(prompt,))
    bubble = Bubble(formula=0.2, formula_text="(P-1)(F+B)", simulated=0.2, measured=0.2, denominator="idle / all")
    result = TrainResult(5.0, 2.0, 2.0, 9, 4.0, 100.0, bubble, continuations=(continuation,))
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    print_result(settings, result, Console(file=file, width=40))
    file.seek(0)
    return file.read().partition("\n\n")[2]


@pytest.mark.parametrize(
    ("continuation", "shown"),
    [
        (b" [bold]x[/bold] [/] \\[ :smile:\n", " [bold]x[/bold] [/] \\[ :smile:\n"),
        (b"\xc3\xa9 \xff \xc3", "é � �"),
        (b"\x1b[2J \x07\x08\x9b \xc2\x9b \r\n\x00", "�[2J ��� � \n�"),
        (b" " + 60 * b"w", " " + 60 * "w"),
    ],
)
def test_whatever_the_model_writes_is_shown_as_plain_text(continuation: bytes, shown: str) -> None:
    assert printed("def", continuation) == f"def{shown}\n"


def test_a_terminal_that_is_not_utf8_shows_what_it_can() -> None:
    assert printed("\xe9", b"\xc3\xa9 \xff", encoding="ascii") == "?? ?\n"


def test_a_prompt_need_not_be_utf8() -> None:
    assert printed("\udcff", b"x") == "�x\n"
