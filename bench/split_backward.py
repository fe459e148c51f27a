"""Whether a split backward is two halves of a full one: I + W against B, and W against B, on transformer blocks.

`python -m stagewright.bench.split_backward`. The same modules go through a stage with full backward, through one with
split backward, and through torch's way of taking the graph apart, in turn; each round gives one ratio. Times are CPU
seconds of one thread, so that what else the machine does matters little.
"""

import argparse
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import thread_time
from types import MappingProxyType
from typing import Final, TypeAlias

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as torch_backward

from stagewright.cli.values import count
from stagewright.engine.stages.randomness import Seeds
from stagewright.engine.stages.stage import Stage
from stagewright.engine.value import pack
from stagewright.models import GPTConfig
from stagewright.models.gpt_layers import Layer

# What I and W may cost together, and the share that W must have at least, of B.
MOST_TOGETHER: Final = 1.05
LEAST_WEIGHT: Final = 0.35
# Rounds at the start that are not counted: memory and gradients come into being.
_NUM_WARMUPS: Final = 5

# M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD of <malloc.h>
_MALLOC_OPTIONS: Final = MappingProxyType({-1: 2**31 - 1, -2: 2**26, -3: 2**30})

# Seconds of F, I and W; of F and B, as (F, B, 0).
Seconds: TypeAlias = tuple[float, float, float]


class Blocks(nn.Module):
    """Some layers of the demo model, as a stage in the middle of a pipeline."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Activation to activation."""
        for layer in self.layers:
            x = layer(x, None)
        return x


@dataclass
class Rounds:
    """The seconds of each round, all measured in turn."""

    full: list[Seconds] = field(default_factory=list)
    split: list[Seconds] = field(default_factory=list)
    torch_split: list[Seconds] = field(default_factory=list)

    def together(self, split: Sequence[Seconds]) -> list[float]:
        """(I + W) / B of each round."""
        return [(i + w) / b for (_, i, w), (_, b, _) in zip(split, self.full)]

    def weight(self, split: Sequence[Seconds]) -> list[float]:
        """W / B of each round."""
        return [w / b for (_, _, w), (_, b, _) in zip(split, self.full)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parsed = _parser().parse_args(arguments)
    config = GPTConfig(
        num_layers=parsed.layers, hidden_size=parsed.hidden, num_heads=parsed.heads, sequence_length=parsed.sequence
    )
    _keep_freed_memory()
    with one_thread():
        rounds = measure(config, parsed.batch, parsed.rounds)
    console = Console()
    console.width = max(console.width, 100)
    console.print(
        f"split backward of {parsed.layers} transformer block(s): hidden {parsed.hidden}, {parsed.batch} x "
        f"{parsed.sequence} tokens, one thread; medians of {parsed.rounds} rounds [quartiles]",
        style="bold",
        highlight=False,
    )
    console.print(table_of(rounds))
    console.print(
        f"bar: (I+W)/B at most {MOST_TOGETHER:g}, W/B at least {LEAST_WEIGHT:g} (! where it does not hold). torch: "
        "its own split of the same modules' graph.",
        style="dim",
        highlight=False,
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stagewright.bench.split_backward", description=__doc__)
    for name, default, meaning in (
        ("layers", 1, "transformer blocks"),
        ("hidden", 256, "hidden size"),
        ("heads", 4, "attention heads"),
        ("sequence", 128, "tokens of a row"),
        ("batch", 8, "rows of a microbatch"),
        ("rounds", 60, "rounds"),
    ):
        parser.add_argument(f"--{name}", type=count, default=default, help=f"{meaning} (default {default})")
    return parser


def _keep_freed_memory() -> None:
    """Let glibc keep what was freed, as the allocators do that training jobs use.

    Else it gives memory back to the system and gets it again all the time, which takes longer than what is measured.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, num_bytes in _MALLOC_OPTIONS.items():
            mallopt(option, num_bytes)


def measure(config: GPTConfig, batch: int, num_rounds: int) -> Rounds:
    """Take the seconds of full and split backwards, in turn.

    Args:
        config: of the blocks.
        batch: rows of a microbatch.
        num_rounds: how often; some more at the start are not counted.
    """
    module = Blocks(config)
    x = torch.randn(batch, config.sequence_length, config.hidden_size)
    dy = torch.randn_like(x)
    seeds = Seeds(0, torch.device("cpu"))
    whole = Stage(1, module, seeds)
    halved = Stage(1, module, seeds, splits_backward=True)
    rounds = Rounds()
    gc.collect()
    gc.disable()
    try:
        for index in range(_NUM_WARMUPS + num_rounds):
            full = _full(whole, x, dy)
            split = _split(halved, x, dy)
            torch_split = _torch_split(module, x, dy)
            if index >= _NUM_WARMUPS:
                rounds.full.append(full)
                rounds.split.append(split)
                rounds.torch_split.append(torch_split)
    finally:
        gc.enable()
    return rounds


def _full(stage: Stage, x: Tensor, dy: Tensor) -> Seconds:
    forward = _timed(lambda: _forward(stage, x))
    backward = _timed(lambda: stage.backward(0, [dy]))
    return forward, backward, 0.0


def _split(stage: Stage, x: Tensor, dy: Tensor) -> Seconds:
    forward = _timed(lambda: _forward(stage, x))
    input_gradient = _timed(lambda: stage.input_gradient(0, [dy]))
    weight_gradient = _timed(lambda: stage.weight_gradient(0))
    return forward, input_gradient, weight_gradient


def _forward(stage: Stage, x: Tensor) -> None:
    output = stage.forward(0, (0, 0), pack(x.detach().requires_grad_(), "the bench"), {}, 0)
    stage.hand_on(0, output)


def _torch_split(module: nn.Module, x: Tensor, dy: Tensor) -> Seconds:
    """By torch.distributed.pipelining: the graph is searched for where weights hang, and run twice."""
    x = x.detach().requires_grad_()
    started = thread_time()
    output = module(x)
    forwarded = thread_time()
    _, groups = torch_backward.stage_backward_input([output], [dy], [x], module.parameters())
    halfway = thread_time()
    torch_backward.stage_backward_weight(module.parameters(), groups)
    return forwarded - started, halfway - forwarded, thread_time() - halfway


def _timed(work: Callable[[], object]) -> float:
    started = thread_time()
    work()
    return thread_time() - started


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, on which backward runs too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def table_of(rounds: Rounds) -> Table:
    """One line for each way to go backward."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("backward", no_wrap=True)
    for heading in ("F ms", "I ms", "W ms", "B ms", "(I+W)/B", "W/B"):
        table.add_column(heading, justify="right", no_wrap=True)
    forward, backward, _ = zip(*rounds.full)
    table.add_row("full", _milliseconds(forward), "", "", _milliseconds(backward), "", "")
    for name, split, is_ours in (("split", rounds.split, True), ("split by torch", rounds.torch_split, False)):
        columns = [_milliseconds(column) for column in zip(*split)]
        together, weight = rounds.together(split), rounds.weight(split)
        table.add_row(
            name,
            *columns,
            "",
            _barred(together, not is_ours or median(together) <= MOST_TOGETHER),
            _barred(weight, not is_ours or median(weight) >= LEAST_WEIGHT),
        )
    return table


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{1000 * median(seconds):.2f}"


def _barred(ratios: Sequence[float], holds: bool) -> Text:
    low, _, high = quantiles(ratios, n=4)
    text = f"{median(ratios):.3f} [{low:.3f}, {high:.3f}]"
    return Text(text) if holds else Text(f"{text} !", style="bold red")


if __name__ == "__main__":
    sys.exit(main())
